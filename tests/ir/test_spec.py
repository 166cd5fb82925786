"""Spec text: what is printed parses back to the same placements, and what is no spec is an error that says where."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from dtensor_compile.errors import SpecTextError
from dtensor_compile.ir.spec import REDUCE_OPS, parse_spec, spec_text

dims = st.integers(0, 12)
placements = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, dims),
    st.builds(Partial, st.sampled_from(REDUCE_OPS)),
    st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 64)),
)


def types_and_values(spec):
    return [(type(p), p) for p in spec]


@settings(max_examples=300, deadline=None)
@given(st.lists(placements, max_size=3).map(tuple))
def test_random_spec_parses_back(spec):
    assert types_and_values(parse_spec(spec_text(spec))) == types_and_values(spec)


@settings(max_examples=300, deadline=None)
@given(st.lists(placements, max_size=3), st.lists(placements, max_size=3))
def test_different_specs_have_different_texts(a, b):
    assert (spec_text(a) == spec_text(b)) == (types_and_values(a) == types_and_values(b))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="RSP_(),0123sumavg ", max_size=12))
def test_any_text_is_a_spec_or_an_error_of_ours(text):
    try:
        spec = parse_spec(text)
    except SpecTextError:
        return
    assert types_and_values(parse_spec(spec_text(spec))) == types_and_values(spec)


def test_texts_read_as_documented():
    spec = (Shard(0), Replicate(), Partial("max"), _StridedShard(1, split_factor=4))
    assert spec_text(spec) == "S(0)RP(max)_S(1,4)"


@pytest.mark.parametrize("op", REDUCE_OPS)
def test_reduce_op_parses_back(op):
    (partial,) = parse_spec(f"P({op})")
    assert partial.reduce_op == op


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("X", r"does not parse at 'X'"),
        ("S(0)S(", r"does not parse at 'S\('"),
        ("S(-1)", r"does not parse at 'S\(-1\)'"),
        ("S()", r"does not parse at 'S\(\)'"),
        ("R R", r"does not parse at ' R'"),
        ("RP(sum)r", r"does not parse at 'r'; a spec looks like 'S\(0\)RP\(sum\)'"),
        ("_S(0)", r"does not parse at '_S\(0\)'"),
        ("_S(0,0)", r"does not parse at '_S\(0,0\)'"),
        ("P", r"does not parse at 'P'"),
        ("P(mean)", r"unknown reduce op 'mean'; known: sum, avg"),
        ("S(٣)", r"does not parse"),
        ("S(0)\n", r"does not parse"),
    ],
)
def test_text_that_is_no_spec(text, message):
    with pytest.raises(SpecTextError, match=message):
        parse_spec(text)


class Diagonal(Placement):
    pass


class ShardOfTheUser(Shard):
    pass


@pytest.mark.parametrize(
    "placement",
    [Diagonal(), ShardOfTheUser(0), _MaskPartial(offset_shape=(4, 2), offset_dim=0)],
    ids=lambda p: type(p).__name__,
)
def test_placement_of_another_kind_has_no_text(placement):
    with pytest.raises(
        SpecTextError, match="no text form; known are Shard, Replicate, strided shards and Partial of sum"
    ):
        spec_text((Replicate(), placement))


def test_custom_reduce_op_has_no_text():
    with pytest.raises(SpecTextError, match="premul"):
        spec_text((Partial("premul"),))
