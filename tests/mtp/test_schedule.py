"""How many drafts: the best of a simulated machine is found and kept, at little cost, and found again when things change."""

import random

import pytest

from mtp.schedule import PROBE_SELDOM, PROBE_STEPS, DraftSchedule


def simulate(schedule: DraftSchedule, num_seqs: int, num_steps: int, acceptance: list[float], costs: list[float], seed=0) -> list[int]:
    """Steps whose k drafts stand with the given rates and which take `costs[k]`, give or take 5 %. Returns the k of each."""
    rng = random.Random(seed)
    chosen, pending = [], 0
    for _ in range(num_steps):
        k = schedule.choose(num_seqs)
        for _ in range(num_seqs):
            drafted = min(k, pending)
            accepted = next((j for j in range(drafted) if rng.random() >= acceptance[j]), drafted)
            if drafted:
                schedule.observe_drafts(drafted, accepted)
        schedule.observe_step(num_seqs, k, costs[k] * rng.uniform(0.95, 1.05))
        chosen.append(k)
        pending = k
    return chosen


def rate(k: int, acceptance: list[float], costs: list[float]) -> float:
    expected = stands = 1.0
    for j in range(k):
        stands *= acceptance[j]
        expected += stands
    return expected / costs[k]


MACHINES = {
    "drafts are cheap": ([0.9, 0.7, 0.5], [1.0, 1.1, 1.2, 1.3]),
    "two pay, three do not": ([0.95, 0.6, 0.1], [1.0, 1.2, 1.45, 1.75]),
    "one pays": ([0.9, 0.2, 0.1], [1.0, 1.3, 1.6, 1.9]),
    "random text": ([0.02, 0.02, 0.02], [1.0, 1.25, 1.5, 1.75]),
    "compute bound": ([0.8, 0.6, 0.4], [1.0, 2.0, 3.0, 4.0]),
}


@pytest.mark.parametrize("num_seqs", [1, 16])
@pytest.mark.parametrize("name", MACHINES)
def test_the_best_is_found_and_kept(name, num_seqs, seed):
    acceptance, costs = MACHINES[name]
    schedule = DraftSchedule(3)
    simulate(schedule, num_seqs, 200, acceptance, costs, seed)
    chosen = simulate(schedule, num_seqs, 1000, acceptance, costs, seed + 1)
    rates = [rate(k, acceptance, costs) for k in range(4)]
    assert sum(rates[k] for k in chosen) / len(chosen) > 0.96 * max(rates)


def test_a_change_of_text_is_noticed(seed):
    costs = [1.0, 1.2, 1.4, 1.6]
    schedule = DraftSchedule(3)
    for acceptance, num_steps in (([0.9, 0.8, 0.7], 500), ([0.02, 0.02, 0.02], 2000), ([0.95, 0.9, 0.9], 4000)):
        simulate(schedule, 1, num_steps, acceptance, costs, seed)
        chosen = simulate(schedule, 1, 200, acceptance, costs, seed + 1)
        rates = [rate(k, acceptance, costs) for k in range(4)]
        assert sum(rates[k] for k in chosen) / len(chosen) > 0.94 * max(rates), acceptance


def test_each_load_has_its_own_answer(seed):
    """Drafts that are free for one sequence cost as much as tokens for a hundred."""
    schedule, acceptance = DraftSchedule(2), [0.9, 0.8]
    few, many = [1.0, 1.05, 1.1], [3.0, 6.0, 9.0]
    for _ in range(5):
        simulate(schedule, 1, 100, acceptance, few, seed)
        simulate(schedule, 100, 10, acceptance, many, seed)
    assert simulate(schedule, 1, 50, acceptance, few, seed).count(2) > 45
    assert simulate(schedule, 100, 50, acceptance, many, seed).count(0) > 40


def test_a_load_near_a_measured_one_tries_nothing_that_is_bad_there(seed):
    """Four sequences after one: at once the k that is best for one, then its neighbours in their turn."""
    acceptance, costs = [0.05, 0.05, 0.05], [1.0, 1.3, 1.6, 1.9]
    schedule = DraftSchedule(3)
    simulate(schedule, 1, 100, acceptance, costs, seed)
    assert simulate(schedule, 4, 30, acceptance, [2.0, 2.6, 3.2, 3.8], seed).count(0) == 30
    # Where drafts are free instead, that shows in the end.
    free = simulate(schedule, 7, 2000, [0.9, 0.9, 0.9], [2.0, 2.0, 2.0, 2.0], seed)
    assert free[-100:].count(3) > 90


TEXTS = {"chat": [0.96, 0.55, 0.47], "prose": [0.62, 0.46, 0.5], "random": [0.01, 0.01, 0.01]}


@pytest.mark.parametrize("text", TEXTS)
def test_batches_that_empty_from_a_cold_start(text):
    """Sixteen sequences of 4 to 60 tokens, four times: some 250 steps of all loads, with what the shipped model's cost on a CPU."""

    def tokens_per_second(schedule: DraftSchedule, seed: int) -> float:
        rng, seconds, num_tokens, pending = random.Random(seed), 0.0, 0, 0
        for _ in range(4):
            left = [rng.randint(4, 60) for _ in range(16)]
            while left:
                n, k = len(left), schedule.choose(len(left))
                for i in range(n):
                    drafted = min(k, pending)
                    accepted = next((j for j in range(drafted) if rng.random() >= TEXTS[text][j]), drafted)
                    if drafted:
                        schedule.observe_drafts(drafted, accepted)
                    left[i] -= 1 + accepted
                    num_tokens += 1 + accepted
                left = [rest for rest in left if rest > 0]
                took = (9 + 0.23 * n + k * (2.3 + 0.22 * n)) * rng.uniform(0.95, 1.05)
                schedule.observe_step(n, k, took)
                seconds += took
                pending = k
        return num_tokens / seconds

    best = max(sum(tokens_per_second(DraftSchedule(k, adaptive=False), seed) for seed in range(10)) for k in range(4))
    assert sum(tokens_per_second(DraftSchedule(3), seed) for seed in range(10)) > 0.95 * best


def test_fixed_means_fixed():
    schedule = DraftSchedule(2, adaptive=False)
    assert set(simulate(schedule, 1, 300, [0.0, 0.0], [1.0, 5.0, 9.0])) == {2}
    assert schedule.acceptance()[0] < 0.05, "measured all the same"


def test_turns_of_others_are_few_and_never_end():
    schedule = DraftSchedule(1)
    simulate(schedule, 1, 2000, [0.0], [1.0, 1.5])
    chosen = simulate(schedule, 1, 10 * PROBE_SELDOM, [0.0], [1.0, 1.5])
    assert PROBE_STEPS * 9 <= chosen.count(1) <= PROBE_STEPS * 11
    last = max(i for i, k in enumerate(chosen) if k)
    assert chosen[last - 1 : last + 1] == [1, 1], "a draft is made in one step and verified in the next"


def test_steps_behind_a_change_say_nothing(seed):
    """They take longer, and a turn is short: what gets one must not look dear."""
    rng, schedule, acceptance, costs, chosen = random.Random(seed), DraftSchedule(2), [0.97, 0.55], [1.3, 1.4, 1.9], []
    for _ in range(600):
        k = schedule.choose(1)
        if k:
            schedule.observe_drafts(k, next((j for j in range(k) if rng.random() >= acceptance[j]), k))
        changed = not chosen or chosen[-1] != k
        schedule.observe_step(1, k, costs[k] * rng.uniform(0.95, 1.05) + 1.0 * changed)
        chosen.append(k)
    assert chosen[300:].count(1) > 0.9 * 300


def test_one_slow_step_changes_nothing():
    acceptance, costs = [0.9, 0.8], [1.0, 1.2, 1.4]
    schedule = DraftSchedule(2)
    simulate(schedule, 1, 100, acceptance, costs)
    schedule.observe_step(1, 2, 500.0)
    assert simulate(schedule, 1, 20, acceptance, costs).count(2) > 15


def test_a_machine_that_others_use_misleads_nobody(seed):
    """Now and then it takes three times as long for a while. What was measured before must not look cheap then."""
    rng, schedule, costs, chosen = random.Random(seed), DraftSchedule(2), [1.0, 1.25, 1.5], []
    for step in range(4000):
        k = schedule.choose(1)
        if k:
            schedule.observe_drafts(k, 0)
        schedule.observe_step(1, k, costs[k] * rng.uniform(0.9, 1.3) * (3 if step % 400 >= 200 else 1))
        chosen.append(k)
    assert chosen[200:].count(0) > 0.9 * len(chosen[200:])


def test_steps_that_are_held_up_now_and_then(seed):
    """One in five waits for others who use the machine, longer than it takes itself."""
    rng, schedule, acceptance, costs, chosen = random.Random(seed), DraftSchedule(3), [0.3, 0.3, 0.3], [3.5, 6.3, 8.0, 10.0], []
    pending = 0
    for _ in range(1000):
        k = schedule.choose(16)
        for drafted in [min(k, pending)] * 16 if min(k, pending) else []:
            schedule.observe_drafts(drafted, next((j for j in range(drafted) if rng.random() >= acceptance[j]), drafted))
        schedule.observe_step(16, k, costs[k] * rng.uniform(0.9, 1.1) + (rng.uniform(1, 10) if rng.random() < 0.2 else 0))
        chosen.append(pending := k)
    assert chosen[100:].count(0) > 0.8 * len(chosen[100:])


def test_acceptance_counts_a_draft_only_where_those_before_it_stood():
    schedule = DraftSchedule(3)
    before = list(schedule._drafted)
    schedule.observe_drafts(3, 1)
    assert [after - b for after, b in zip(schedule._drafted, before, strict=True)] == [1, 1, 0]
    schedule.observe_drafts(2, 2)
    assert [after - b for after, b in zip(schedule._drafted, before, strict=True)] == [2, 2, 0]


def steps_of(schedule: DraftSchedule, num_seqs: int, num_steps: int, acceptance: list[float], cost, rng: random.Random) -> list[int]:
    """Choices where an engine reports what it does: not a step that makes more drafts than it verifies. cost: number of drafts and step."""
    chosen, pending = [], 0
    for step in range(num_steps):
        k = schedule.choose(num_seqs)
        verified = min(k, pending)
        if verified:
            schedule.observe_drafts(verified, next((j for j in range(verified) if rng.random() >= acceptance[j]), verified))
        if k <= pending:
            schedule.observe_step(num_seqs, k, cost(k, step) * rng.uniform(0.95, 1.05))
        chosen.append(k)
        pending = k
    return chosen


def test_what_no_draft_costs_need_not_be_known_for_the_rest_to_be_learnt(seed):
    """A load begins with the proportions of another one; with two drafts the best, none gets no turn there. Then drafts become dear."""
    rng, schedule = random.Random(seed), DraftSchedule(2)
    steps_of(schedule, 1, 300, [0.9, 0.8], lambda k, _: 1 + 0.1 * k, rng)
    assert set(steps_of(schedule, 2, 300, [0.9, 0.8], lambda k, _: 1 + 0.1 * k, rng)[-30:]) == {2}
    chosen = steps_of(schedule, 2, 8 * PROBE_SELDOM, [0.9, 0.8], lambda k, _: 1 + 2.0 * k, rng)
    assert chosen[-1000:].count(0) > 950


def test_a_machine_that_becomes_faster_makes_no_turn_look_cheap(seed):
    rng, schedule = random.Random(seed), DraftSchedule(1)
    steps_of(schedule, 1, 1000, [0.9], lambda k, _: 3 * (1 + 0.3 * k), rng)
    chosen = steps_of(schedule, 1, 4 * PROBE_SELDOM, [0.9], lambda k, _: 1 + 0.3 * k, rng)
    assert chosen.count(1) > 0.95 * len(chosen)


def test_a_step_of_a_turn_that_is_held_up_does_not_count(seed):
    """Others take the machine for the second measured step of every turn."""
    rng, schedule, run = random.Random(seed), DraftSchedule(1), 0
    schedule.observe_drafts(1, 0)
    chosen = []
    for step in range(3000):
        k = schedule.choose(1)
        run = run + 1 if k else 0
        if k:
            schedule.observe_drafts(1, rng.random() < 0.55)
        held = 4 if k and step > 100 and run == 4 else 1
        schedule.observe_step(1, k, (1 + 0.4 * k) * held * rng.uniform(0.97, 1.03))
        chosen.append(k)
    assert chosen[200:].count(1) > 0.9 * len(chosen[200:])
