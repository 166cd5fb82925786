"""A cluster and a GPU that are not there.

    from dtensor_compile import offline

    with offline.job(512, rank=3), offline.device("h200") as gpu:
        mesh = init_device_mesh("cuda", (512,), mesh_dim_names=("tp",))
        model = parallelize_module(build().cuda(), mesh, plan)
        torch.compile(model, backend="dtensor")(tokens.cuda()).sum().backward()
    print(gpu.table())

- ``device``: the emulated device, and what was compiled for it: generated code, Triton kernels, PTX and cubin.
- ``job``: the process is one rank of a job whose other ranks exist in name only.
"""

from dtensor_compile.offline.emulated_device import EmulatedDevice, EmulatedGraph, IssuedStep, Kernel, device
from dtensor_compile.offline.simulated_job import job

__all__ = ["EmulatedDevice", "EmulatedGraph", "Kernel", "IssuedStep", "device", "job"]
