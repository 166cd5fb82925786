"""Compile time by stage and by layer: a profile of made-up phases, and that of a model."""

from unittest import mock

import pytest
import torch
from torch import nn

import dtensor_compile
from dtensor_compile.compat.inductor.compile import fresh_caches
from dtensor_compile.recording import profile as profiles
from dtensor_compile.recording.profile import STAGES, Profile, layer_of
from dtensor_compile.testing import on_ranks


def clock(profile, *times):
    return mock.patch.object(profiles.time, "perf_counter", iter(times).__next__)


def seconds(table):
    return {key: (spent.seconds, spent.count) for key, spent in table.items()}


def test_an_interval_counts_for_the_innermost_phase():
    profile = Profile()
    with clock(profile, 0, 1, 2, 4, 7, 11):
        profile.begin("dynamo")
        profile.begin_module("L['self'].blocks[1].norm")
        profile.begin("bytecode_tracing")  # of the same stage, and layer
        profile.end("bytecode_tracing")
        profile.end("L['self'].blocks[1].norm")
        profile.end("dynamo")
    assert seconds(profile.parts) == {
        ("Dynamo", "bytecode_tracing"): (2, 1),
        ("Dynamo", "dynamo"): (9, 2),  # 11 in all
    }
    assert seconds(profile.layers) == {("blocks.1", "Dynamo"): (6, 2)}


def test_another_stage_is_not_for_the_layer_at_which_it_begins():
    profile = Profile()
    with clock(profile, 0, 1, 2, 5, 6, 7):
        profile.begin("Scheduler.codegen")
        profile.begin_module("L['self'].head")
        profile.begin("compile_file")
        profile.end("compile_file")
        profile.end("L['self'].head")
        profile.end("Scheduler.codegen")
    assert seconds(profile.layers) == {("head", "code generation"): (2, 1)}


def test_an_end_ends_what_an_error_left_open():
    profile = Profile()
    with clock(profile, 0, 1, 3, 4):
        profile.begin("dynamo")
        profile.begin("bytecode_tracing")
        profile.end("dynamo")
        profile.end("began before the profile")
        profile.begin("dynamo")
    assert seconds(profile.parts) == {("Dynamo", "bytecode_tracing"): (2, 1), ("Dynamo", "dynamo"): (1, 1)}


def test_layers_are_members_of_lists_and_of_the_model():
    paths = ("blocks.3.attention.wq", "model.layers.0", "head", "")
    assert [layer_of(path) for path in paths] == ["blocks.3", "model.layers.0", "head", ""]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


@pytest.mark.slow
@on_ranks(1)
def test_the_profile_of_a_model():
    torch._dynamo.reset()
    with fresh_caches(), dtensor_compile.record(profile=True) as recording:
        torch.compile(Model(), backend="dtensor", fullgraph=True)(torch.ones(3, 4)).sum().backward()
    profile = recording.profile
    stages = {stage for stage, _ in profile.parts}
    assert set(STAGES) == stages, set(STAGES) ^ stages
    assert all(spent.seconds >= -1e-9 for table in (profile.parts, profile.layers) for spent in table.values())
    for stage in ("Dynamo", "joint trace", "Inductor's lowering"):
        layers = {layer: spent.seconds for (layer, of), spent in profile.layers.items() if of == stage}
        assert set(layers) == {"blocks.0", "blocks.1", "head"}
        assert sum(layers.values()) <= sum(spent.seconds for (of, _), spent in profile.parts.items() if of == stage)
    assert ("dtensor_compile", "lower_redistributions") in profile.parts
    side = recording.report().ours
    assert sum(row.measured_seconds for row in side.stages) == sum(spent.seconds for spent in profile.parts.values())
    assert [row.stage for row in side.stages] == sorted((row.stage for row in side.stages), key=STAGES.index)
    assert recording.report(cluster="h100").ours.layers == side.layers


@on_ranks(1)
def test_nothing_is_measured_without_being_asked_for():
    torch._dynamo.reset()
    with dtensor_compile.record() as recording:
        torch.compile(Model(), backend="dtensor_aten")(torch.ones(3, 4))
    assert recording.profile is None and recording.report().ours.stages == ()
