"""Options: what is accepted, what passes through to Inductor, and what an error says."""

import pytest
import torch

from dtensor_compile import OptionError, Options
from dtensor_compile.testing import on_ranks


def test_defaults():
    assert Options.parse() == Options()
    assert Options.parse("default", {}) == Options()


def test_own_options_and_inductors():
    options = Options.parse(None, {"strict": True, "disable_passes": ["cancel_inverse_pairs"], "max_autotune": True})
    assert options.strict and options.disable_passes == ("cancel_inverse_pairs",)
    assert dict(options.inductor) == {"max_autotune": True}


def test_dashes_are_underscores():
    assert Options.parse(None, {"disable-passes": "cancel_inverse_pairs"}).disable_passes == ("cancel_inverse_pairs",)


def test_mode_is_inductors():
    assert Options.parse("max-autotune-no-cudagraphs").inductor["max_autotune"] is True


@pytest.mark.parametrize(
    "mode, options, says",
    [
        (None, {"strickt": True}, "unknown option 'strickt': did you mean 'strict'"),
        (None, {"max_autotun": True}, "did you mean 'max_autotune'"),
        (None, {"qqqq": 1}, "options of this backend: capture, kernels, disable_passes, enable_passes, strict"),
        (None, {"kernels": "cuda"}, "option 'kernels' takes one of 'inductor', 'aten', not 'cuda'"),
        (None, {"strict": 1}, "option 'strict' takes True or False, not 1"),
        (
            None,
            {"disable_passes": ["nope"]},
            "not 'nope'; the passes are: share_equal_redistributions, cancel_inverse_pairs, ",
        ),
        (None, {"enable_passes": "merge_sums"}, "not 'merge_sums'; the passes are: exchange_rows"),
        (
            None,
            {"redistribution_memory": 0},
            "'redistribution_memory' takes a number of bytes from 1, or None for no limit, not 0",
        ),
        (
            None,
            {"regather": "sometimes"},
            "'regather' takes 'always', 'never', a number of bytes from 0, or None, not 'sometimes'",
        ),
        (None, {"regather": True}, "or None, not True"),
        (None, {"redistribution_memory": "1GB"}, "or None for no limit, not '1GB'"),
        (None, {"disable_passes": 3}, "takes a list of pass names, not 3"),
        (None, {"max_autotune": "yes"}, "takes bool, not 'yes'"),
        ("fastest", None, "unknown mode 'fastest'; modes: default, "),
    ],
)
def test_error_names_what_is_allowed(mode, options, says):
    with pytest.raises(OptionError, match=says):
        Options.parse(mode, options)


def test_options_are_frozen():
    with pytest.raises(AttributeError):
        Options().strict = True


@on_ranks(2)
def test_error_reaches_the_user_of_torch_compile():
    compiled = torch.compile(lambda x: x + 1, backend="dtensor", options={"strickt": True})
    with pytest.raises(Exception, match="did you mean 'strict'"):
        compiled(torch.ones(2))


@on_ranks(2)
def test_capture_off_is_stock():
    from dtensor_compile import record
    from tests.test_training import tp_mlp

    model, x = tp_mlp(), torch.randn(4, 8)
    with record() as recording:
        out = torch.compile(model, backend="dtensor", fullgraph=True, options={"capture": False})(x)
    torch.testing.assert_close(out, model(x))
    assert recording.captured == [] and recording.graphs == []


@on_ranks(2)
def test_a_pass_of_the_users_own_runs_after_ours():
    from tests.test_training import tp_mlp

    seen = []

    def own(graph):
        seen.append([str(n.target) for n in graph.nodes])

    model, x = tp_mlp(), torch.randn(4, 8)
    torch.compile(model, backend="dtensor", fullgraph=True, options={"post_grad_custom_pre_pass": own})(x)
    assert seen and any("_c10d_functional" in target for target in seen[0])
    assert not any("dtensor_compile" in target for target in seen[0])
