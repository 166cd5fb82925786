"""The order of tasks: what it hides, what it keeps, and that random programs keep their dependencies and their
memory.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_compile.schedule import list_scheduler as schedule
from dtensor_compile.schedule.least_time import least_seconds
from dtensor_compile.schedule.list_scheduler import arrange, excess
from dtensor_compile.schedule.simulated_device import Buffer, SimulatedDevice, Task, simulate


class Program(list):
    """Tasks, with their memory by index."""

    def add(self, *, size=0, kept=False, reads=(), **about):
        read = {buffer: None for index in reads for buffer in self[index].makes}
        if about.get("waits_for") is not None:
            read.update(dict.fromkeys(self[about["waits_for"]].reads))
        self.append(Task(makes=(Buffer(size, size, kept),), reads=tuple(read), **about))
        return len(self) - 1

    def compute(self, seconds, *after, reads=None, **about):
        return self.add(seconds=seconds, after=after, reads=after if reads is None else reads, **about)

    def start(self, seconds, *after, link="net", **about):
        return self.add(seconds=seconds, after=after, link=link, reads=after, **about)

    def wait(self, start):
        return self.add(after=(start,), waits_for=start, reads=(start,))


def layers(count, gather, compute, size=0):
    """Gather, wait, compute for each layer; a layer also needs the result of the one before it."""
    program = Program()
    for _ in range(count):
        before = [len(program) - 1] if program else []
        start = program.start(gather, size=size)
        program.compute(compute, program.wait(start), *before, reads=(start,))
    return program


def exposed(tasks, order):
    return list(simulate(tasks, order).exposed.values())


def test_gathers_are_prefetched_over_layers():
    program = layers(3, 4, 5)
    assert exposed(program, range(9)) == [4, 4, 4]
    order = arrange(program, float("inf"))
    assert exposed(program, order) == [4, 0, 0]
    assert order == [0, 3, 1, 6, 2, 4, 5, 7, 8]


def test_a_place_in_flight_is_free_while_the_link_has_less_to_do_than_the_longest_kernel():
    program = layers(4, 1, 2)
    order = arrange(program, float("inf"))
    assert exposed(program, order) == [1, 0, 0, 0]
    assert order.index(9) > order.index(2)  # the fourth has to wait for a place


def test_reductions_start_as_soon_as_they_are_ready_though_the_link_is_busy():
    program, gradient, starts = Program(), None, []
    for _ in range(4):
        gradient = program.compute(1, *([] if gradient is None else [gradient]), size=8, reads=())
        mean = program.compute(0, gradient, size=8)  # which nothing but the reduction needs
        starts.append(program.start(40, mean, size=8))
        program.wait(starts[-1])
    end = program.compute(9, gradient)
    order = arrange(program, float("inf"))
    assert all(order.index(start) < order.index(end) for start in starts)
    assert [order.index(start) for start in starts] == [2, 5, 8, 11]


@pytest.mark.parametrize("between", [False, True], ids=["sum", "sum and a kernel"])
def test_a_short_collective_is_waited_for_where_compute_would_delay_a_long_one(between):
    """Blocks of a backward pass: gradients of each are sent after a sum of a few of them over another link."""
    program, gradient, starts = Program(), None, []
    for _ in range(3):
        gradient = program.compute(17, *([] if gradient is None else [gradient]), size=8, reads=())
        ready = program.wait(program.start(0.1, gradient, link="short", size=8))
        if between:
            ready = program.compute(0, ready, size=8)
        starts.append(program.start(4, ready, link="long", size=8))
        program.wait(starts[-1])
    order = arrange(program, float("inf"))
    blocks = [index for index, task in enumerate(program) if task.seconds == 17]
    assert [order.index(start) < order.index(block) for start, block in zip(starts, blocks[1:])] == [True, True]
    assert simulate(program, order).seconds == pytest.approx(3 * 17 + 3 * 0.1 + 4)
    impatient, *_ = schedule._arranged(program, float("inf"), False, list(range(len(program))), float("inf"))
    assert simulate(program, impatient).seconds == pytest.approx(3 * 17 + 2 * 4)


def test_independent_compute_fills_the_gap():
    program = Program()
    gradient = program.compute(2)
    weight = program.compute(3)
    reduced = program.wait(program.start(3, gradient))
    program.compute(2, reduced)
    assert exposed(program, range(5)) == [3]
    order = arrange(program, float("inf"))
    assert order == [gradient, 2, weight, reduced, 4] and exposed(program, order) == [0]


def reduction(steps):
    program = Program()
    gradient = program.compute(1, size=8)
    program.wait(program.start(4, gradient))
    for _ in range(steps):
        program.compute(1, len(program) - 1 if len(program) > 3 else gradient, reads=())
    return program


def test_reductions_are_waited_for_when_they_are_surely_done():
    order = arrange(reduction(8), float("inf"))
    assert order.index(2) == 7  # after 4 s, and a quarter more
    assert arrange(reduction(2), float("inf"))[-1] == 2


def test_memory_bounds_what_is_in_flight():
    program = layers(5, 4, 5, size=100)
    assert simulate(program, range(15)).peak == 100
    for bound in (100, 200, 300):
        assert simulate(program, arrange(program, bound)).peak <= bound
    assert exposed(program, arrange(program, 100)) == [4] * 5
    assert exposed(program, arrange(program, 200)) == [4, 0, 0, 0, 0]


def test_of_the_orders_that_keep_the_bound_the_fastest_is_taken(monkeypatch):
    program = layers(5, 4, 5, size=100)
    slow, fast, large = list(range(15)), arrange(program, 200), [*range(0, 15, 3), *(i for i in range(15) if i % 3)]
    assert simulate(program, large).peak > 200 and exposed(program, large) == exposed(program, fast)
    orders = iter([large, slow, fast])
    monkeypatch.setattr(schedule._Arrangement, "run", lambda self: next(orders))
    assert arrange(program, 200) == fast and not list(orders)


def test_memory_is_kept_back_only_until_the_task_that_needs_it_has_run():
    program = Program()
    before = program.compute(2, program.compute(2, program.compute(1, size=1), size=8), size=1)
    for _ in range(4):
        start = program.start(4, size=4)
        before = program.compute(3, program.wait(start), before, size=1, reads=(start, before))
    assert simulate(program, range(15)).peak == 9 and simulate(program, range(15)).seconds == 33
    order = arrange(program, 10)
    assert (found := simulate(program, order)).peak == 10 and found.seconds == 5 + 4 * 4 + 3


def test_what_memory_does_not_allow_yet_holds_up_nothing_else():
    """A large result that may be made at any time, such as zeros, does not end the reductions that could hide."""
    program = Program()
    for _ in range(3):
        gradient = program.compute(4, *[len(program) - 3] * bool(program), size=8, reads=())
        program.wait(program.start(4, gradient))
    large = program.compute(1, size=90, reads=())
    program.compute(1, large, len(program) - 4)
    order = arrange(program, 100)
    found = simulate(program, order)
    assert found.peak <= 100 and found.seconds == least_seconds(program) == 16
    assert order.index(large) > order.index(program.index(program[6]))


def test_what_would_be_live_at_a_peak_is_moved_behind_it():
    """A gather that is only needed after the peak, and a result that nobody frees before it in the fastest order."""
    program = Program()
    early = program.start(1, size=30)
    first = program.compute(4, program.wait(early), size=10, reads=(early,))
    peak = program.compute(4, first, size=60)
    late = program.start(1, size=30)
    program.compute(4, program.wait(late), peak, reads=(late, peak))
    assert simulate(program, arrange(program, float("inf"))).peak == 100
    bounded = arrange(program, 90)
    assert simulate(program, bounded).peak <= 90 and bounded.index(late) > bounded.index(peak)


def test_a_start_goes_before_the_compute_that_the_collective_before_it_held_up():
    program = layers(4, 4, 2)
    assert arrange(program, float("inf")) == [0, 3, 1, 6, 2, 4, 9, 5, 7, 8, 10, 11]
    assert simulate(program, arrange(program, float("inf"))).seconds == 4 * 4 + 2 == least_seconds(program)


def test_a_link_has_its_next_collective_before_one_ends_where_memory_allows_it():
    program = layers(4, 4, 2, size=10)
    *ready, _ = (index for index, task in enumerate(program) if task.waits_for is not None)

    def in_flight_at_waits(bound):
        device, found = SimulatedDevice(program), []
        for index in arrange(program, bound):
            if index in ready:
                found.append(device.in_flight("net"))
            device.run(index)
        return found

    assert in_flight_at_waits(20) == [2, 2, 2]
    assert in_flight_at_waits(10) == [1, 1, 1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-7, 1e-2), st.floats(1e-7, 1e-2)), min_size=1, max_size=12))
def test_times_that_do_not_add_up_exactly_come_to_an_end(times):
    program = Program()
    for gather, compute in times:
        before = [len(program) - 1] if program else []
        program.compute(compute, program.wait(program.start(gather)), *before)
    assert sorted(arrange(program, float("inf"))) == list(range(len(program)))


def test_what_a_start_reads_is_there_until_its_wait():
    program = Program()
    start = program.start(1, program.compute(1, size=10), size=1)
    program.compute(1, size=100)
    program.wait(start)
    assert simulate(program, range(4)).peak == 111


def test_nothing_to_gain_changes_nothing():
    program = Program()
    last = program.compute(1)
    for _ in range(2):
        last = program.compute(1, program.wait(program.start(2, last)))
    assert arrange(program, float("inf")) == list(range(7))
    assert arrange([Task(1.0), Task(2.0, (0,))], float("inf")) == [0, 1]


def test_links_are_independent():
    for link, seconds in (("a", 9), ("b", 5)):
        program = Program()
        starts = program.start(4, link="a"), program.start(4, link=link)
        program.compute(1, *map(program.wait, starts))
        assert simulate(program, range(5)).seconds == seconds


@st.composite
def programs(draw, most=40):
    program, in_flight = Program(), []
    for index in range(draw(st.integers(1, most))):
        before = draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        before = [i for i in before if program[i].link is None]  # what started is read behind its wait
        about = {"size": draw(st.integers(0, 9)), "kept": draw(st.booleans())}
        kind = draw(st.sampled_from(["compute", "compute", "start", "wait", "input"]))
        if kind == "wait" and in_flight:
            start = in_flight.pop(draw(st.integers(0, len(in_flight) - 1)))
            program.add(after=(start, *before), waits_for=start, reads=(start, *before))
        elif kind == "start":
            started = [i for i, task in enumerate(program) if task.link is not None]
            link, seconds = draw(st.sampled_from("ab")), draw(st.integers(0, 5))
            behind = draw(st.one_of(st.none(), st.integers(0, seconds)))
            after = (*before, *started[-1:])
            in_flight.append(program.add(seconds=seconds, after=after, link=link, reads=before, behind=behind, **about))
        elif kind == "input":
            program.add(given=True, **about)
        else:
            program.compute(draw(st.integers(0, 5)), *before, **about)
    return program


@settings(max_examples=300, deadline=None)
@given(programs(), st.floats(0, 1))
def test_any_program_keeps_its_dependencies_and_its_bound(tasks, fraction):
    unscheduled = simulate(tasks, range(len(tasks)))
    bound = excess(fraction, unscheduled.peak)
    order = arrange(tasks, bound)
    assert sorted(order) == list(range(len(tasks)))
    place = {index: p for p, index in enumerate(order)}
    assert all(place[before] < place[index] for index, task in enumerate(tasks) for before in task.after)
    starts = [index for index in order if tasks[index].link is not None]
    assert starts == sorted(starts)
    found = simulate(tasks, order)
    assert found.seconds <= unscheduled.seconds and found.peak <= bound or order == list(range(len(tasks)))
    assert arrange(tasks, bound) == order
    assert least_seconds(tasks) <= simulate(tasks, arrange(tasks, float("inf"))).seconds + 1e-9


def test_least_seconds_of_programs_of_one_bottleneck():
    assert least_seconds(layers(3, 4, 5)) == 4 + 3 * 5  # the first gather has nothing beside it
    assert least_seconds(layers(3, 5, 4)) == 3 * 5 + 4  # nor has the last compute
    sent = reduction(2)
    assert least_seconds(sent) == simulate(sent, arrange(sent, float("inf"))).seconds


def test_least_seconds_counts_all_compute_before_a_start():
    program = Program()
    parts = [program.compute(2) for _ in range(3)]
    program.wait(program.start(5, *parts))
    assert least_seconds(program) == 3 * 2 + 5


def test_a_start_behind_another_does_not_wait_for_its_end():
    program = Program()
    first = program.start(9, link="a")
    program.compute(3, program.wait(program.start(1, first, link="b")))
    program.wait(first)
    assert least_seconds(program) == 9 == simulate(program, range(len(program))).seconds


@settings(max_examples=60, deadline=None)
@given(programs(most=7))
def test_no_order_at_all_takes_less(tasks):
    def orders(done):
        if len(done) == len(tasks):
            yield done
        for index, task in enumerate(tasks):
            if index not in done and all(before in done for before in task.after):
                yield from orders([*done, index])

    assert min(simulate(tasks, order).seconds for order in orders([])) >= least_seconds(tasks) - 1e-9


@pytest.mark.parametrize("fraction, peak, bound", [(0.05, 100, 105.0), (0.0, 7, 7.0), (float("inf"), 7, float("inf"))])
def test_excess(fraction, peak, bound):
    assert excess(fraction, peak) == pytest.approx(bound)


def test_latency_of_a_collective_is_over_where_it_was_queued():
    """Of 5 seconds 3 are its bytes: behind another one it has these alone, but never less than 5 since its start."""
    program = Program()
    starts = [program.start(5, behind=3) for _ in range(3)]
    program.compute(1, *map(program.wait, starts))
    assert simulate(program, range(len(program))).seconds == 5 + 3 + 3 + 1 == least_seconds(program)
    program = Program()
    first = program.start(5, behind=3)
    late = program.compute(4)
    program.wait(first)
    program.wait(program.start(5, late, behind=3))
    assert simulate(program, [0, 1, 3, 2, 4]).seconds == 4 + 5


def test_starting_a_collective_takes_time_of_the_host():
    program = Program()
    program.add(seconds=4.0, link="net", host=1.0)
    program.compute(2.0)
    program.add(waits_for=0, after=(0,))
    found = simulate(program, range(3))
    assert found.seconds == 1 + 4 and found.exposed == {0: 4 - 2}
