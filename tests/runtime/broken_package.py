"""A program for a job in which one rank cannot import the package; it imports nothing of the package itself."""

import importlib.abc
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


class Broken(importlib.abc.MetaPathFinder):
    """Does not find one module of it."""

    def find_spec(self, name, path=None, target=None):
        if name == "dtensor_compile.stages.program":
            raise ImportError("this installation is incomplete")


def gather_with_a_package_that_is_broken_on_rank_1():
    if dist.get_rank() == 1:
        assert "dtensor_compile.stages.program" not in sys.modules
        sys.meta_path.insert(0, Broken())
    x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    return torch.compile(lambda x: x.full_tensor().sum(), backend="dtensor_aten", fullgraph=True)(x)
