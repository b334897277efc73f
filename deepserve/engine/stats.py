"""What a scheduler counts: no torch, no I/O."""

from dataclasses import dataclass, field


@dataclass
class SchedulerStats:
    """Counters since start."""

    num_preemptions: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_drafts: int = 0  # times that a sequence had drafts verified
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: list[int] = field(default_factory=list)

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """A sequence had `num_drafted` drafts verified, of which the first `num_accepted` stood."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.num_accepted_by_position[position] += 1
