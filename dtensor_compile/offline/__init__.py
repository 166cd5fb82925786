"""An emulated cluster and GPU.

    from dtensor_compile import offline

    with offline.job(512, rank=3), offline.device("h200") as gpu:
        mesh = init_device_mesh("cuda", (512,), mesh_dim_names=("tp",))
        model = parallelize_module(build().cuda(), mesh, plan)
        torch.compile(model, backend="dtensor")(tokens.cuda()).sum().backward()
    print(gpu.table())

- ``device``: the emulated device, and the code compiled for it: generated code, Triton kernels, PTX and cubin.
- ``job``: makes the process one rank of a simulated job without other ranks.
"""

from dtensor_compile.offline.emulated_device import EmulatedDevice, EmulatedGraph, IssuedStep, Kernel, device
from dtensor_compile.offline.simulated_job import job

__all__ = ["EmulatedDevice", "EmulatedGraph", "Kernel", "IssuedStep", "device", "job"]
