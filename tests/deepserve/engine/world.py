"""A scheduler, its pages and a fake runner, driven in verbs; and what each request must come to, worked out without any of them."""

from dataclasses import dataclass, field

from deepserve.engine.pages import Pages
from deepserve.engine.request import Limits, PositionLogprobs, SamplingParams, SequenceOutput, validate
from deepserve.engine.scheduler import Scheduler, SchedulerConfig
from deepserve.engine.step import StepPlan, StepResult
from mtp.schedule import DraftSchedule
from tests.deepserve.engine.fake_runner import EOS, VOCAB_SIZE, FakeRunner, NextToken, draw, prompt_logprob, pseudo_random_token


@dataclass
class Story:
    """All news of one sequence, joined."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0

    def add(self, output: SequenceOutput) -> None:
        assert self.finish_reason is None, "news of a finished sequence"
        assert output.prompt_logprobs is None or (not self.tokens and self.prompt_logprobs is None), "prompt logprobs come once, first"
        assert not output.num_cached_tokens or not self.tokens
        self.tokens += output.token_ids
        self.finish_reason, self.stop_token_id = output.finish_reason, output.stop_token_id
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)


class World:
    """`submit`, `step`, `abort`, `discard`; the audit runs after each of them."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        next_token: NextToken = pseudo_random_token,
        prefix_caching: bool = True,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_chunk_tokens: int | None = None,
        chunked_prefill: bool = True,
        asynchronous: bool = False,
        num_drafts: int = 0,
    ):
        """num_drafts: that each step makes and verifies.

        asynchronous: each step is planned, and run by the fake, before the result of the one before it is applied.
        """
        self.asynchronous = asynchronous
        self.launched: StepResult | None = None
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_chunk_tokens=max_chunk_tokens or max_num_batched_tokens,
            chunked_prefill=chunked_prefill,
            eos_token_ids=frozenset({EOS}),
            max_in_flight=2 if asynchronous else 1,
        )
        self.pages = Pages(num_pages, page_size, prefix_caching=prefix_caching)
        drafts = DraftSchedule(num_drafts, adaptive=False) if num_drafts else None
        self.scheduler = Scheduler(self.config, self.pages, drafts)
        self.runner = FakeRunner(self.config, num_pages, page_size, next_token)
        self.limits = Limits(vocab_size=VOCAB_SIZE, max_model_len=num_pages * page_size, max_seq_tokens=num_pages * page_size)
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.stories: dict[tuple[str, int], Story] = {}

    # Verbs

    def submit(self, request_id: str, prompt: list[int], *, cache_salt: str = "", **params) -> None:
        checked = validate(prompt, SamplingParams(**{"seed": 0, "max_tokens": 4, **params}), self.limits)
        self.requests[request_id] = prompt, checked
        self.stories |= {(request_id, i): Story() for i in range(checked.n)}
        self.scheduler.add(request_id, prompt, checked, cache_salt)
        self.audit()

    def step(self) -> StepPlan | None:
        """One step. Returns its plan, None when nothing could run."""
        plan = self.scheduler.plan()
        result = None if plan is None else self.runner.run(plan)
        if self.asynchronous:
            result, self.launched = self.launched, result
        if result is not None:
            for output in self.scheduler.apply(result):
                self.stories[output.request_id, output.index].add(output)
        self.audit()
        return plan

    def discard(self, *, ran: bool = True) -> StepPlan | None:
        """A step whose result is lost, on the device or before it got there."""
        plan = self.scheduler.plan()
        if plan is not None and ran:
            self.runner.run(plan)
        self.scheduler.discard()
        self.launched = None
        self.audit()
        return plan

    def abort(self, request_id: str) -> bool:
        found = self.scheduler.abort(request_id)
        self.requests.pop(request_id, None)
        self.audit()
        return found

    def step_until_preempted(self, request_id: str) -> None:
        while request_id not in self.running:
            assert self.step() is not None
        while request_id not in self.waiting:
            assert self.step() is not None
            assert request_id in self.running + self.waiting, "it ended before it could be preempted"

    def finish(self, max_steps: int = 2000) -> int:
        """Step until all is done. Returns the number of steps; a step that cannot run is an error here."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_work and self.launched is None:
                self.check_stories()
                assert self.pages.num_held == 0
                return num_steps
            late = self.launched is not None
            assert self.step() is not None or late, "there is work but no plan"
        raise AssertionError(f"not done after {max_steps} steps")

    # What must hold

    def audit(self) -> None:
        self.scheduler.check()
        assert len(self.scheduler.running) <= self.config.max_num_seqs

    def check_stories(self) -> None:
        """Every sequence that was not aborted ended as it does alone."""
        for request_id, (prompt, params) in self.requests.items():
            for i in range(params.n):
                found, wanted = self.stories[request_id, i], self.alone(prompt, params, i)
                found.num_cached_tokens = wanted.num_cached_tokens  # depends on company
                assert found == wanted, (request_id, i)

    def alone(self, prompt: list[int], params: SamplingParams, index: int) -> Story:
        """What a sequence must come to, from the rule of the draws alone."""
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {EOS})
        story, tokens = Story(), list(prompt)
        while story.finish_reason is None and len(story.tokens) < params.max_tokens:
            token = draw(self.runner.next_token, tokens, len(prompt), params, index, ends)
            tokens.append(token)
            story.tokens.append(token)
            if params.logprobs is not None:
                story.logprobs.append(PositionLogprobs([token], [-float(token)], 1))
            if token in ends and len(story.tokens) > params.min_tokens:
                story.finish_reason, story.stop_token_id = "stop", token
        story.finish_reason = story.finish_reason or "length"
        if params.prompt_logprobs is not None and index == 0:
            story.prompt_logprobs = [None, *(prompt_logprob(prompt, p) for p in range(1, len(prompt)))]
        return story

    # What tests look at

    @property
    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.waiting]

    def counts(self, plan: StepPlan) -> dict[str, int]:
        """Tokens of each request in a plan that was just applied or not yet, by the rows sequences hold; ended ones are left out."""
        of_row = dict(zip(plan.rows, plan.counts, strict=True))
        return {s.request_id: of_row[s.row] for s in self.scheduler.running if s.row in of_row}

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return self.stories[request_id, index].tokens
