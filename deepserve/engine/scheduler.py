"""Which tokens run in the next step. Host only and pure: `plan()` out, `apply(result)` in, no torch, no clock, no I/O.

There is no prefill phase and no decode phase: each sequence has `num_computed` tokens in the cache and catches up with its
known tokens. A step takes sequences one token behind first (decode), then longer catch-ups in chunks (prefill), then admits
waiting ones, all within one token budget. A decode entry may verify drafts of the tokens behind its own; all of a step verify equally many.

Nothing irrevocable happens in `plan()`: tokens and computed lengths advance only in `apply()`. With `max_in_flight` 2 a step may be
planned while the one before it runs, from optimistic lengths: every drawn token is taken to go on, every draft to stand. Where a
sequence did not go on (end token, abort, preemption), the later result is void and dropped; where a draft fell, lengths go back once that
is known. Pages may be given away at once, because a device runs steps in order: what a void step wrote is overwritten by whoever has
the page then.
"""

from array import array
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from deepserve.engine.pages import Pages
from deepserve.engine.request import SamplingParams, Sequence, SequenceOutput
from deepserve.engine.stats import SchedulerStats
from deepserve.engine.step import RowFill, StepPlan, StepResult, new_pages
from deepserve.messages import Submit
from mtp.schedule import DraftSchedule


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one rank's steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int  # most tokens of one sequence in a step
    chunked_prefill: bool
    eos_token_ids: frozenset[int]
    max_in_flight: int = 1  # 2: asynchronous scheduling
    # Most tokens of a step that only decodes which it may reach by verifying drafts; None: the whole budget.
    max_verified_tokens: int | None = None


@dataclass(frozen=True)
class _InFlight:
    """A plan without a result."""

    plan: StepPlan
    order: list[Sequence]  # by entry
    stays: list[int]  # in which stay each was planned
    num_drafts: list[int]  # of each decode entry: how many of the verified inputs are drafts that somebody made


class Scheduler:
    """Sequences of one rank: waiting (oldest first; preempted ones in front) and running (by admission, oldest first)."""

    def __init__(self, config: SchedulerConfig, pages: Pages, drafts: DraftSchedule | None = None):
        """drafts: says how many tokens to draft; None: the model has no MTP module, or it is not used."""
        self.config, self.pages, self.drafts = config, pages, drafts
        self.stats = SchedulerStats(num_accepted_by_position=[0] * (drafts.max_drafts if drafts else 0))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._arrived: deque[Sequence] = deque()  # prompts computed elsewhere; they hold pages and wait for a row
        self._untold: list[Sequence] = []  # of those that run, who has a row that the runner has not been told of
        self._followers: dict[str, list[Sequence]] = {}  # sequences 1.. of a request, until sequence 0 has computed the prompt
        self._num_live: dict[str, int] = {}  # unfinished sequences of each request
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[_InFlight] = deque()  # oldest first
        self._num_planned = 0
        self._resend_all = False

    # Requests

    def add(self, request_id: str, prompt: list[int], params: SamplingParams, cache_salt: str = "", *, hands_off: bool = False) -> Sequence:
        """Queue a validated request (`request.validate`); its first sequence. hands_off: it stops for good behind its first draw, and keeps
        its pages until `abort`.
        """
        assert params.max_tokens is not None and params.seed is not None, "params come from validate()"
        most = 1 if hands_off else params.max_tokens
        assert self.pages.num_for(len(prompt) + most) <= self.pages.num_pages, "a request that can never fit was let in"
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.config.eos_token_ids)
        tokens = array("i", prompt)
        sequences = [Sequence(request_id, i, tokens, params, cache_salt, ends) for i in range(1 if hands_off else params.n)]
        sequences[0].hands_off = hands_off
        self._num_live[request_id] = len(sequences)
        self.waiting.append(sequences[0])
        if len(sequences) > 1:
            # The first one computes the prompt; the others then find it in the prefix cache.
            self._followers[request_id] = sequences[1:]
        return sequences[0]

    def take_over(self, submit: Submit, pages: list[int], hashes: list[bytes], first: SequenceOutput) -> list[SequenceOutput]:
        """Go on with a request whose prompt is computed: `pages` hold it, those of `hashes` are published, `first` was drawn behind it.
        Returns news for clients.
        """
        sequence = self.add(submit.request_id, submit.prompt_token_ids, submit.params, submit.cache_salt)
        self.waiting.remove(sequence)
        sequence.pages, sequence.page_hashes, sequence.num_cached = pages, hashes, first.num_cached_tokens
        sequence.prompt_logprobs = first.prompt_logprobs or []
        output = sequence.append(first.token_ids, first.logprobs)
        self._count(sequence, output)
        self._advance(sequence, sequence.num_prompt)
        sequence.num_started, sequence.num_expected = sequence.num_computed, len(sequence.tokens)
        if output.finish_reason is None:
            self._arrived.append(sequence)
        else:
            self.pages.release(pages)
            self._forget(sequence.request_id, 1)
        return [output, *self._release_followers(sequence)]

    def abort(self, request_id: str) -> bool:
        """Forget a request and free what it holds. Returns whether it was known."""
        if self._num_live.pop(request_id, None) is None:
            return False
        self._followers.pop(request_id, None)
        for sequence in [s for s in self.running if s.request_id == request_id]:
            self.running.remove(sequence)
            self._vacate(sequence)
        for sequence in [s for s in self._arrived if s.request_id == request_id]:
            self._arrived.remove(sequence)
            self.pages.release(sequence.pages)
        self.waiting = deque(s for s in self.waiting if s.request_id != request_id)
        return True

    def knows(self, request_id: str) -> bool:
        """Whether any sequence of the request is unfinished."""
        return request_id in self._num_live

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._arrived) + sum(map(len, self._followers.values()))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._arrived)

    @property
    def num_free_rows(self) -> int:
        """More sequences that can run, beside those that are here with their pages."""
        return len(self._free_rows) - len(self._arrived)

    # Planning

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run. At most `max_in_flight` plans may wait for their results."""
        assert len(self._in_flight) < self.config.max_in_flight, "earlier plans were neither applied nor discarded"
        self._seat()
        num_drafts = self.drafts.choose(len(self.running) or 1) if self.drafts else 0
        scheduled: dict[Sequence, int] = {}  # tokens in this step; decode entries first
        num_preemptions = self.stats.num_preemptions
        decoding, behind = self._split_running()
        num_drafts = self._num_affordable(decoding, num_drafts)
        # Where nobody has drafts yet they are made first and verified from the next step on.
        num_verified = num_drafts if any(sequence.num_drafts for sequence in decoding) else 0
        self._plan_decode(decoding, num_verified, scheduled)
        num_decode = len(scheduled)
        self._plan_chunks(behind, num_drafts, scheduled)
        if self.stats.num_preemptions > num_preemptions:
            num_decode = sum(sequence in scheduled for sequence in decoding)  # a victim may have been scheduled already
            admitted = []
        else:
            admitted = self._admit(scheduled)
        if not scheduled:
            return None
        if not num_verified:  # who comes in one token behind, after a prefix hit, decodes like any other
            late = [s for s in admitted if s.num_expected - s.num_started == 1 and s.params.max_tokens]
            scheduled = dict.fromkeys((*list(scheduled)[:num_decode], *late), 1) | scheduled
            num_decode += len(late)
        return self._compose(scheduled, admitted, num_decode, num_drafts)

    def discard(self) -> None:
        """Drop the plans in flight, if any; the next plan tells the runner everything again."""
        self._in_flight.clear()
        self.pages.end_writes(self._num_planned)
        for sequence in self.running:
            sequence.num_started = sequence.num_computed
            sequence.num_expected = len(sequence.tokens)
            sequence.num_drafts = 0
        self._resend_all = True

    def _seat(self) -> None:
        """Rows for sequences that came with their pages."""
        while self._arrived and self._free_rows:
            sequence = self._arrived.popleft()
            sequence.row = self._free_rows.pop()
            self.running.append(sequence)
            self._untold.append(sequence)

    def _split_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences that can go on: those one token behind, which decode, and those that catch up in chunks."""
        decoding: list[Sequence] = []
        behind: list[Sequence] = []
        for sequence in self.running:
            if sequence.hands_off and sequence.num_expected > sequence.num_prompt:
                continue
            missing = sequence.num_expected - sequence.num_started
            if missing > 1 or (missing and not sequence.params.max_tokens):
                behind.append(sequence)
            elif missing and (sequence.num_started < len(sequence.tokens) or not _may_end(sequence)):
                decoding.append(sequence)
        return decoding, behind

    def _num_affordable(self, decoding: list[Sequence], num_drafts: int) -> int:
        """At most `num_drafts`, so many that all can verify them within the token budget and nobody is preempted for them."""
        if not num_drafts or not decoding:
            return num_drafts
        budget = min(self.config.max_num_batched_tokens, self.config.max_verified_tokens or self.config.max_num_batched_tokens)
        num_drafts = min(num_drafts, max(0, budget // len(decoding) - 1))
        if len(decoding) * self.pages.num_for(1 + num_drafts) <= self.pages.num_available:  # as if nobody had room in its last page
            return num_drafts
        missing = sum(max(0, self._num_pages_ahead(s, num_drafts) - len(s.pages)) for s in decoding)
        return num_drafts if missing <= self.pages.num_available else 0

    def _num_pages_ahead(self, sequence: Sequence, num_drafts: int) -> int:
        """Pages for its next token and the drafts behind it, as far as it can get."""
        return self.pages.num_for(min(sequence.num_started + 1 + num_drafts, sequence.most_tokens - 1))

    def _plan_decode(self, decoding: list[Sequence], num_drafts: int, scheduled: dict[Sequence, int]) -> None:
        budget, page_size, count = self.config.max_num_batched_tokens, self.pages.page_size, 1 + num_drafts
        for sequence in decoding:
            if budget < count:
                break
            if sequence.row is None:
                continue  # preempted for an older one just now
            roomy = sequence.num_started + count <= len(sequence.pages) * page_size
            if roomy or self._grow(sequence, self._num_pages_ahead(sequence, num_drafts), scheduled):
                scheduled[sequence] = count
                budget -= count

    def _plan_chunks(self, behind: list[Sequence], num_drafts: int, scheduled: dict[Sequence, int]) -> None:
        for sequence in behind:
            # A victim of _grow may have been scheduled already, so the budget is counted anew.
            budget = self.config.max_num_batched_tokens - sum(scheduled.values())
            if budget <= 0:
                break
            if sequence.row is None:
                continue
            count = min(sequence.num_expected - sequence.num_started, self.config.max_chunk_tokens, budget)
            if self._grow(sequence, self.pages.num_for(sequence.num_started + count), scheduled):
                scheduled[sequence] = count

    def _grow(self, sequence: Sequence, num_pages: int, scheduled: dict[Sequence, int]) -> bool:
        """Give a running sequence `num_pages`, preempting the newest others if need be. False: it was itself the newest."""
        missing = num_pages - len(sequence.pages)
        while missing > self.pages.num_available:
            victim = self.running[-1]
            scheduled.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.pages += self.pages.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything from a running sequence; it waits in front and computes its tokens again, mostly from the prefix cache."""
        assert self.running.pop() is sequence, "only the newest is preempted"
        self._vacate(sequence)
        sequence.num_computed = sequence.num_started = 0
        sequence.num_expected = len(sequence.tokens)  # what is in flight will be drawn again, and be the same
        sequence.num_drafts = 0
        sequence.num_preemptions += 1
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs.clear()
        self.waiting.appendleft(sequence)
        self.stats.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages, self._in_flight[-1].plan.step if self._in_flight else None)
        sequence.pages = []
        sequence.page_hashes = []
        if sequence in self._untold:
            self._untold.remove(sequence)
        assert sequence.row is not None
        self._free_rows.append(sequence.row)
        sequence.row = None
        sequence.stay += 1

    def _admit(self, scheduled: dict[Sequence, int]) -> list[Sequence]:
        """Move waiting sequences to running while rows, tokens and pages last, in order."""
        admitted: list[Sequence] = []
        budget = self.config.max_num_batched_tokens - sum(scheduled.values())
        while self.waiting and self._free_rows and budget > 0:
            sequence = self.waiting[0]
            hits, hashes = ([], []) if sequence.wants_prompt_logprobs else self.pages.match(sequence.tokens, sequence.cache_salt)
            num_cached = len(hits) * self.pages.page_size
            count = min(len(sequence.tokens) - num_cached, self.config.max_chunk_tokens, budget)
            if not self.config.chunked_prefill and count < len(sequence.tokens) - num_cached:
                break
            # Room for all known tokens and the next one, lest it be preempted before its first token. Where nobody else holds any it fits.
            whole = self.pages.num_for(len(sequence.tokens) + (sequence.params.max_tokens > 0)) - len(hits)
            if whole > self.pages.num_available - self.pages.num_cached_of(hits):
                break
            self.waiting.popleft()
            self.pages.hold(hits)
            fresh = self.pages.allocate(self.pages.num_for(num_cached + count) - len(hits))
            sequence.pages, sequence.page_hashes = hits + fresh, hashes
            sequence.num_computed = sequence.num_started = num_cached
            sequence.row = self._free_rows.pop()
            if sequence.num_preemptions == 0:
                sequence.num_cached = num_cached
                self.stats.num_prefix_hit_tokens += num_cached
                self.stats.num_prefix_queried_tokens += sequence.num_prompt
                self.stats.num_prompt_tokens += sequence.num_prompt
            self.running.append(sequence)
            admitted.append(sequence)
            scheduled[sequence] = count
            budget -= count
        return admitted

    def _compose(self, scheduled: dict[Sequence, int], admitted: list[Sequence], num_decode: int, num_drafts: int) -> StepPlan:
        order = list(scheduled)
        fills = self.running if self._resend_all else [*self._untold, *admitted]
        self._resend_all, self._untold = False, []
        for sequence in fills:
            sequence.num_sent_pages = len(sequence.pages)
        page_rows, page_idxs, page_ids = new_pages(order)
        counts = list(scheduled.values())
        starts = [s.num_started for s in order]
        draws = [i for i, s in enumerate(order) if i < num_decode or (starts[i] + counts[i] == s.num_expected and s.params.max_tokens)]
        plan = StepPlan(
            step=self._num_planned,
            fills=[RowFill.of(s) for s in fills],
            page_rows=page_rows,
            page_idxs=page_idxs,
            page_ids=page_ids,
            rows=[s.row for s in order],
            starts=starts,
            counts=counts,
            num_decode=num_decode,
            query_len=counts[0] if num_decode else 1,
            num_drafts=num_drafts,
            draws=draws,
            prompt_logprobs=[i for i, s in enumerate(order) if s.wants_prompt_logprobs and starts[i] < s.num_prompt],
        )
        self._num_planned += 1
        verified = [min(plan.query_len - 1, s.num_drafts) for s in order[:num_decode]]
        self._in_flight.append(_InFlight(plan, order, [s.stay for s in order], verified))
        for sequence, count in zip(order, counts, strict=True):
            sequence.num_started += count
        for i in draws:
            order[i].num_expected += counts[i] if i < num_decode else 1
            order[i].num_drafts = num_drafts
        return plan

    # Results

    def apply(self, result: StepResult) -> list[SequenceOutput]:
        """Advance by the oldest plan in flight. Returns news for clients; finished sequences have left and freed their pages."""
        assert self._in_flight and self._in_flight[0].plan.step == result.step, "a result without its plan"
        step = self._in_flight.popleft()
        self.pages.end_writes(result.step)
        plan = step.plan
        self.stats.num_steps += 1
        outputs: list[SequenceOutput] = []
        drawn = dict(zip(plan.draws, result.tokens, strict=True))
        done: list[Sequence] = []
        for i, sequence in enumerate(step.order):
            if sequence.stay != step.stays[i]:
                continue  # it ended, was aborted or was preempted while this step ran
            tokens = drawn.get(i)
            if i < plan.num_decode:
                self._settle_drafts(sequence, step.num_drafts[i], plan.query_len, len(tokens))
                # The last token that it may have is never computed, even if a draft of it was.
                end = min(sequence.num_computed + len(tokens), sequence.most_tokens - 1)
            else:
                end = plan.starts[i] + plan.counts[i]
            if i in result.prompt_logprobs:
                sequence.add_prompt_logprobs(result.prompt_logprobs[i])
            first = not sequence.num_generated
            output = None
            if tokens is not None:
                output = sequence.append(tokens, result.logprobs.get(i))
                self._count(sequence, output)
            elif end == sequence.num_prompt and not sequence.params.max_tokens:
                output = sequence.scored()
            self._advance(sequence, end)
            if output is None:
                continue
            outputs.append(output)
            if first:
                outputs += self._release_followers(sequence)
            if output.finish_reason is not None and not sequence.hands_off:
                done.append(sequence)
        if done:
            self._finish(done)
        return outputs

    def _settle_drafts(self, sequence: Sequence, num_drafts: int, query_len: int, num_tokens: int) -> None:
        """A decode entry came to `num_tokens`, of `query_len` that were taken for granted; `num_drafts` of its inputs were drafts."""
        sequence.num_started -= query_len - num_tokens
        sequence.num_expected -= query_len - num_tokens
        # What lies behind the last token that it may have is no draft's fault.
        num_drafts = min(num_drafts, sequence.most_tokens - len(sequence.tokens) - 1)
        if num_drafts <= 0:
            return
        num_accepted = min(num_drafts, num_tokens - 1)
        self.drafts.observe_drafts(num_drafts, num_accepted)
        self.stats.count_drafts(num_drafts, num_accepted)

    def _count(self, sequence: Sequence, output: SequenceOutput) -> None:
        if not sequence.hands_off:  # who takes it over counts its token
            self.stats.num_generated_tokens += len(output.token_ids)

    def _advance(self, sequence: Sequence, end: int) -> None:
        """Tokens before `end` are computed, as far as they are the sequence's. Full pages go to the prefix cache."""
        page_size, start = self.pages.page_size, sequence.num_computed
        sequence.num_computed = min(end, len(sequence.tokens))
        if sequence.num_computed // page_size > start // page_size:
            self._publish(sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Offer pages that are full and computed to the prefix cache."""
        hashes = sequence.page_hashes
        for page_idx in range(len(hashes), sequence.num_computed // self.pages.page_size):
            parent = hashes[-1] if hashes else self.pages.root_hash(sequence.cache_salt)
            hashes.append(self.pages.publish(sequence.pages[page_idx], sequence.tokens, page_idx, parent))

    def _release_followers(self, leader: Sequence) -> list[SequenceOutput]:
        """The prompt is computed: the request's other sequences may start. If nothing is to be generated they are done."""
        followers = self._followers.pop(leader.request_id, []) if leader.index == 0 else []
        if leader.params.max_tokens:
            self.waiting.extendleft(reversed(followers))
            return []
        self._forget(leader.request_id, len(followers))
        return [sequence.scored() for sequence in followers]

    def _finish(self, done: list[Sequence]) -> None:
        gone = set(done)
        self.running = [s for s in self.running if s not in gone]
        for sequence in done:
            self._vacate(sequence)
            self._forget(sequence.request_id, 1)

    def _forget(self, request_id: str, num_sequences: int) -> None:
        self._num_live[request_id] -= num_sequences
        if not self._num_live[request_id]:
            del self._num_live[request_id]

    def check(self, held: Iterable[list[int]] = ()) -> None:
        """Audit: pages, rows and queues agree. `held`: pages that others hold. AssertionError says what is wrong."""
        self.pages.check([*(s.pages for s in (*self.running, *self._arrived)), *held])
        rows = [s.row for s in self.running] + self._free_rows
        assert sorted(rows) == list(range(self.config.max_num_seqs)), f"rows counted twice or lost: {sorted(rows)}"
        assert all(s.row is None and not s.pages for s in self.waiting), "a waiting sequence holds something"
        live = Counter(s.request_id for s in (*self.running, *self._arrived, *self.waiting, *chain(*self._followers.values())))
        assert live == self._num_live, "requests and their sequences differ"


def _may_end(sequence: Sequence) -> bool:
    """Whether a token in flight may be the last one that the sequence may have."""
    return sequence.num_expected >= sequence.most_tokens
