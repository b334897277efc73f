"""Which tokens run in the next step. Host only and pure: `plan()` out, `apply(result)` in, no torch, no clock, no I/O.

There is no prefill phase and no decode phase: each sequence has `num_computed` tokens in the cache and catches up with its
known tokens. A step takes sequences one token behind first (decode), then longer catch-ups in chunks (prefill), then admits
waiting ones, all within one token budget.

Nothing irrevocable happens in `plan()`: tokens and computed lengths advance only in `apply()`. With `max_in_flight` 2 a step may be
planned while the one before it runs, from optimistic lengths: every drawn token is taken to go on. Where it did not (end token, abort,
preemption), the later result is void and dropped. Its pages may be given away at once, because a device runs steps in order: what
the void step wrote is overwritten by whoever has the page then.
"""

from array import array
from collections import Counter, deque
from dataclasses import dataclass
from itertools import chain

from deepserve.engine.pages import Pages
from deepserve.engine.request import SamplingParams, Sequence, SequenceOutput
from deepserve.engine.step import RowFill, StepPlan, StepResult


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one rank's steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int  # most tokens of one sequence in a step
    chunked_prefill: bool
    eos_token_ids: frozenset[int]
    max_in_flight: int = 1  # 2: asynchronous scheduling


@dataclass
class SchedulerStats:
    """Counters since start."""

    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0


class Scheduler:
    """Sequences of one rank: waiting (oldest first; preempted ones in front) and running (by admission, oldest first)."""

    def __init__(self, config: SchedulerConfig, pages: Pages):
        self.config, self.pages = config, pages
        self.stats = SchedulerStats()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._followers: dict[str, list[Sequence]] = {}  # sequences 1.. of a request, until sequence 0 has computed the prompt
        self._num_live: dict[str, int] = {}  # unfinished sequences of each request
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        # Plans without results, oldest first: their sequences by entry, and in which stay each was planned.
        self._in_flight: deque[tuple[StepPlan, list[Sequence], list[int]]] = deque()
        self._num_planned = 0
        self._resend_all = False

    # Requests

    def add(self, request_id: str, prompt: list[int], params: SamplingParams, cache_salt: str = "") -> None:
        """Queue a validated request (`request.validate`)."""
        assert params.max_tokens is not None and params.seed is not None, "params come from validate()"
        assert self.pages.num_for(len(prompt) + params.max_tokens) <= self.pages.num_pages, "a request that can never fit was let in"
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.config.eos_token_ids)
        tokens = array("i", prompt)
        sequences = [Sequence(request_id, i, tokens, params, cache_salt, ends) for i in range(params.n)]
        self._num_live[request_id] = params.n
        self.waiting.append(sequences[0])
        if params.n > 1:
            # The first one computes the prompt; the others then find it in the prefix cache.
            self._followers[request_id] = sequences[1:]

    def abort(self, request_id: str) -> bool:
        """Forget a request and free what it holds. Returns whether it was known."""
        if self._num_live.pop(request_id, None) is None:
            return False
        self._followers.pop(request_id, None)
        for sequence in [s for s in self.running if s.request_id == request_id]:
            self.running.remove(sequence)
            self._vacate(sequence)
        self.waiting = deque(s for s in self.waiting if s.request_id != request_id)
        return True

    def knows(self, request_id: str) -> bool:
        """Whether any sequence of the request is unfinished."""
        return request_id in self._num_live

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(map(len, self._followers.values()))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # Planning

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run. At most `max_in_flight` plans may wait for their results."""
        assert len(self._in_flight) < self.config.max_in_flight, "earlier plans were neither applied nor discarded"
        scheduled: dict[Sequence, int] = {}  # tokens in this step
        preempted = self._plan_running(scheduled)
        admitted = [] if preempted else self._admit(scheduled)
        if not scheduled:
            return None
        plan, order = self._compose(scheduled, admitted)
        self._in_flight.append((plan, order, [sequence.stay for sequence in order]))
        return plan

    def discard(self) -> None:
        """Drop the plans in flight, if any; the next plan tells the runner everything again."""
        self._in_flight.clear()
        for sequence in self.running:
            sequence.num_started = sequence.num_computed
            sequence.num_expected = len(sequence.tokens)
        self._resend_all = True

    def _plan_running(self, scheduled: dict[Sequence, int]) -> bool:
        """Decode tokens, then chunks, of running sequences. Returns whether somebody had to be preempted for pages."""
        budget = self.config.max_num_batched_tokens
        page_size = self.pages.page_size
        behind: list[Sequence] = []
        num_preemptions = self.stats.num_preemptions
        for sequence in list(self.running):
            if sequence.row is None:
                continue  # preempted for an older one just now
            start = sequence.num_started
            missing = sequence.num_expected - start
            if missing > 1:
                behind.append(sequence)
            elif missing == 0 or budget == 0 or (start >= len(sequence.tokens) and _will_end(sequence)):
                continue
            elif start < len(sequence.pages) * page_size or self._grow(sequence, start + 1, scheduled):
                scheduled[sequence] = 1
                budget -= 1
        for sequence in behind:
            # A victim of _grow may have been scheduled already, so the budget is counted anew.
            budget = self.config.max_num_batched_tokens - sum(scheduled.values())
            if budget <= 0:
                break
            if sequence.row is None:
                continue
            count = min(sequence.num_expected - sequence.num_started, self.config.max_chunk_tokens, budget)
            if self._grow(sequence, sequence.num_started + count, scheduled):
                scheduled[sequence] = count
        return self.stats.num_preemptions > num_preemptions

    def _grow(self, sequence: Sequence, num_tokens: int, scheduled: dict[Sequence, int]) -> bool:
        """Give a running sequence pages for `num_tokens`, preempting the newest others if need be. False: it was itself the newest."""
        missing = self.pages.num_for(num_tokens) - len(sequence.pages)
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
        sequence.num_preemptions += 1
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs.clear()
        self.waiting.appendleft(sequence)
        self.stats.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        sequence.pages = []
        sequence.page_hashes = []
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
            # Room for all known tokens and the next one, lest it be preempted before its first token. Alone it always fits.
            whole = self.pages.num_for(len(sequence.tokens) + (sequence.params.max_tokens > 0)) - len(hits)
            if self.running and whole > self.pages.num_available - self.pages.num_cached_of(hits):
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

    def _compose(self, scheduled: dict[Sequence, int], admitted: list[Sequence]) -> tuple[StepPlan, list[Sequence]]:
        """Plan and its sequences in entry order: single tokens first."""
        singles = [s for s, count in scheduled.items() if count == 1]
        order = singles if len(singles) == len(scheduled) else singles + [s for s, count in scheduled.items() if count > 1]
        fills = self.running if self._resend_all else admitted
        self._resend_all = False
        for sequence in fills:
            sequence.num_sent_pages = len(sequence.pages)
        page_rows: list[int] = []
        page_idxs: list[int] = []
        page_ids: list[int] = []
        for sequence in order:
            num_pages = len(sequence.pages)
            if num_pages > sequence.num_sent_pages:
                new = range(sequence.num_sent_pages, num_pages)
                page_rows += [sequence.row] * len(new)
                page_idxs += new
                page_ids += sequence.pages[new.start :]
                sequence.num_sent_pages = num_pages
        counts = [scheduled[s] for s in order]
        starts = [s.num_started for s in order]
        draws = [i for i, s in enumerate(order) if starts[i] + counts[i] == s.num_expected and s.params.max_tokens]
        plan = StepPlan(
            step=self._num_planned,
            fills=[_fill(s) for s in fills],
            page_rows=page_rows,
            page_idxs=page_idxs,
            page_ids=page_ids,
            rows=[s.row for s in order],
            starts=starts,
            counts=counts,
            num_single=len(singles),
            draws=draws,
            prompt_logprobs=[i for i, s in enumerate(order) if s.wants_prompt_logprobs and starts[i] < s.num_prompt],
        )
        self._num_planned += 1
        for sequence, count in zip(order, counts, strict=True):
            sequence.num_started += count
        for i in draws:
            order[i].num_expected += 1
        return plan, order

    # Results

    def apply(self, result: StepResult) -> list[SequenceOutput]:
        """Advance by the oldest plan in flight. Returns news for clients; finished sequences have left and freed their pages."""
        assert self._in_flight and self._in_flight[0][0].step == result.step, "a result without its plan"
        plan, order, stays = self._in_flight.popleft()
        self.stats.num_steps += 1
        outputs: list[SequenceOutput] = []
        page_size = self.pages.page_size
        drawn = dict(zip(plan.draws, result.tokens, strict=True))
        done: list[Sequence] = []
        for i, sequence in enumerate(order):
            if sequence.stay != stays[i]:
                continue  # it ended, was aborted or was preempted while this step ran
            start = plan.starts[i]
            sequence.num_computed = end = start + plan.counts[i]
            if end // page_size > start // page_size:
                self._publish(sequence)
            if i in result.prompt_logprobs:
                self._add_prompt_logprobs(sequence, result.prompt_logprobs[i])
            if i in drawn:
                output = self._append(sequence, drawn[i], result.logprobs.get(i))
            elif end == sequence.num_prompt and not sequence.params.max_tokens:
                output = self._scored(sequence)
            else:
                continue
            outputs.append(output)
            if sequence.num_generated <= 1:
                outputs += self._release_followers(sequence)
            if output.finish_reason is not None:
                done.append(sequence)
        if done:
            self._finish(done)
        return outputs

    def _append(self, sequence: Sequence, token: int, logprobs) -> SequenceOutput:
        """The one place through which a drawn token enters a sequence."""
        sequence.tokens.append(token)
        self.stats.num_generated_tokens += 1
        reason = stop_token = None
        if token in sequence.end_token_ids and sequence.num_generated > sequence.params.min_tokens:
            reason, stop_token = "stop", token
        elif sequence.num_generated >= sequence.params.max_tokens:
            reason = "length"
        first = sequence.num_generated == 1
        return SequenceOutput(
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=[token],
            finish_reason=reason,
            stop_token_id=stop_token,
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=sequence.prompt_logprobs if first and sequence.prompt_logprobs else None,
            num_cached_tokens=sequence.num_cached if first else 0,
        )

    def _scored(self, sequence: Sequence) -> SequenceOutput:
        """A request for no tokens is done when its prompt is computed."""
        prompt_logprobs = sequence.prompt_logprobs or None
        return SequenceOutput(sequence.request_id, sequence.index, [], "length", None, None, prompt_logprobs, sequence.num_cached)

    def _add_prompt_logprobs(self, sequence: Sequence, positions: list) -> None:
        if not sequence.prompt_logprobs:
            sequence.prompt_logprobs.append(None)  # nothing precedes the first token
        sequence.prompt_logprobs += positions

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
        return [self._scored(sequence) for sequence in followers]

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

    def check(self) -> None:
        """Audit: pages, rows and queues agree. AssertionError says what is wrong."""
        self.pages.check([s.pages for s in self.running])
        rows = [s.row for s in self.running] + self._free_rows
        assert sorted(rows) == list(range(self.config.max_num_seqs)), f"rows counted twice or lost: {sorted(rows)}"
        assert all(s.row is None and not s.pages for s in self.waiting), "a waiting sequence holds something"
        live = Counter(s.request_id for s in (*self.running, *self.waiting, *chain(*self._followers.values())))
        assert live == self._num_live, "requests and their sequences differ"


def _will_end(sequence: Sequence) -> bool:
    """Whether a token in flight is the last one that the sequence may have."""
    return sequence.num_expected - sequence.num_prompt >= sequence.params.max_tokens


def _fill(sequence: Sequence) -> RowFill:
    assert sequence.row is not None
    return RowFill(
        row=sequence.row,
        sequence_idx=sequence.index,
        num_prompt=sequence.num_prompt,
        tokens=sequence.tokens.tobytes(),
        pages=list(sequence.pages),
        params=sequence.params,
        end_token_ids=tuple(sorted(sequence.end_token_ids)),
    )
