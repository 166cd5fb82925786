"""What generated code has between the start of a collective and its wait."""

from dtensor_compile.report.written_code import without_work, written_collectives

CODE = """
cpp_fused_add_0 = async_compile.cpp('''void kernel() {}''')

class Runner:
    def call(self, args):
        a, b = args
        with torch.cuda._DeviceGuard(0):
            buf0 = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([a, b], 2, '1')
            buf1 = buf0[0]
            assert_size_stride(buf1, (2, 2), (2, 1), \
'torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default')
            buf2 = buf0[1]
            del buf0
            buf3 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
            buf4 = torch.ops._c10d_functional.reduce_scatter_tensor.default(a, 'sum', 2, '3')
            torch.ops._c10d_functional.wait_tensor.default(buf4)
            cpp_fused_add_0(a, b, buf3)
            torch.ops._c10d_functional.all_reduce_.default(buf3, 'sum', '3')
            torch.ops._c10d_functional.wait_tensor.default(buf1)
            extern_kernels.mm(buf1, b, out=buf5)
            torch.ops._c10d_functional.wait_tensor.default(buf2)
            buf6 = reinterpret_tensor(buf3, (4, ), (1, ), 0); del buf3  # reuse
            torch.ops._c10d_functional.wait_tensor.default(buf6)
            torch.ops._c10d_functional.all_reduce_coalesced_.default([buf5, \
reinterpret_tensor(buf6, (2, 2), (2, 1), 0)], 'sum', '3')
            torch.ops._c10d_functional.wait_tensor.default(buf5)
            triton_poi_fused_mul_1.run(buf5, buf6, 4, stream=stream0)
            torch.ops._c10d_functional.wait_tensor.default(buf6)
        return (buf5, )
"""


def test_kernels_count_up_to_the_first_wait():
    found = [(this.name, this.group, this.between) for this in written_collectives(CODE)]
    assert found == [
        ("all_gather_into_tensor_coalesced", "1", ["cpp_fused_add_0"]),
        ("reduce_scatter_tensor", "3", []),
        ("all_reduce_", "3", ["mm"]),
        ("all_reduce_coalesced_", "3", []),
    ]
    assert all(this.is_waited for this in written_collectives(CODE))


def test_what_is_waited_for_at_once_is_found():
    assert [this.name for this in without_work(CODE)] == ["reduce_scatter_tensor", "all_reduce_coalesced_"]


def test_a_name_that_is_given_to_other_memory_is_no_collective_any_more():
    code = CODE.replace("buf5 = ", "buf5 = ").replace(
        "torch.ops._c10d_functional.wait_tensor.default(buf2)",
        "buf2 = empty_strided_cpu((2, 2), (2, 1), torch.float32); torch.ops._c10d_functional.wait_tensor.default(buf2)",
    )
    assert [this.between for this in written_collectives(code)][0] == ["cpp_fused_add_0"]


def test_a_collective_that_nothing_waits_for_is_reported():
    code = CODE.replace("torch.ops._c10d_functional.wait_tensor.default(buf4)\n", "pass\n")
    (this,) = [this for this in written_collectives(code) if not this.is_waited]
    assert this.name == "reduce_scatter_tensor" and len(this.between) == 3
