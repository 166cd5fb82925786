"""The order of ``fully_shard`` itself: one module ahead, one reduction in flight."""

from dtensor_compile.schedule.simulated_device import simulate
from dtensor_compile.schedule.wrapper_order import wrapper_order, wrapper_peak
from tests.schedule.test_list_scheduler import Program


def modules(count):
    """Forward of some modules as a compiler may run it: each gather is waited for at once. Tasks: start, wait,
    compute.
    """
    program = Program()
    for _ in range(count):
        before = [len(program) - 1] if program else []
        start = program.start(3, size=10)
        program.compute(5, program.wait(start), *before, size=1, reads=(start, *before))
    return program


def test_each_module_gathers_while_the_one_before_it_computes():
    program = modules(3)
    assert wrapper_order(program, {0, 3, 6}, set()) == [0, 1, 3, 2, 4, 6, 5, 7, 8]
    assert simulate(program, range(9)).peak == 12 and wrapper_peak(program, {0: False, 3: False, 6: False}) == 22


def test_a_reduction_is_waited_for_when_the_next_one_starts():
    program = Program()
    for _ in range(3):
        gradient = program.compute(5, *[len(program) - 3] * bool(program), size=10, reads=())
        program.wait(program.start(3, gradient, size=1))
    found = wrapper_order(program, set(), {1, 4, 7})
    assert found == [0, 1, 3, 2, 4, 6, 5, 7, 8]
    assert wrapper_peak(program, {1: True, 4: True, 7: True}) > simulate(program, range(9)).peak


def test_other_collectives_are_waited_for_at_once():
    program = Program()
    a = program.compute(1)
    start = program.start(1, a)
    wait = program.wait(start)
    b = program.compute(1)
    assert wrapper_order(program, set(), set()) == [a, start, wait, b]


def test_a_tie_between_starts_does_not_bind_the_wrapper():
    program = modules(2)
    program.append(program.pop())  # the same tasks
    tied = program[3].__class__(**{**vars(program[3]), "after": (0,)})
    program[3] = tied
    assert wrapper_order(program, {0, 3}, set())[:3] == [0, 1, 3]


def test_without_a_wrapper_there_is_no_peak():
    assert wrapper_peak(modules(2), {}) == 0
