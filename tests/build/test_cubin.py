import pytest

from flashkda_build.cubin import read_cubin
from flashkda_build.errors import BuildError

ARCHS = ["sm_90a", "sm_100a", "sm_103a"]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_cubin_tells_its_parameters_and_sizes(toys, arch):
    cubin = read_cubin((toys / f"prepare.flashkda.a.{arch}.cubin").read_bytes())
    assert cubin.parameters == ((0, 8), (8, 8), (16, 8), (24, 4), (28, 4))
    assert cubin.threads == 128
    assert 0 < cubin.registers < 64
    assert cubin.frame == 0
    assert cubin.static_shared_memory == 0
    assert "scale" in cubin.entry
    assert f"sm_{cubin.sm}a" == arch
    assert cubin.cuda_version == 129
    assert cubin.ptxas_version in (None, "12.9.83")


def test_local_memory_shows_as_a_frame(offenders):
    assert read_cubin((offenders / "recurrence.local.sm_90a.cubin").read_bytes()).frame == 64


def test_bytes_that_are_no_cubin_are_refused(toys):
    data = (toys / "prepare.flashkda.a.sm_90a.cubin").read_bytes()
    for damaged in (b"", b"not an ELF file", data[:100], data[: len(data) // 2]):
        with pytest.raises(BuildError, match="not a readable cubin"):
            read_cubin(damaged)


def test_an_elf_file_for_another_machine_is_refused(toys):
    data = bytearray((toys / "prepare.flashkda.a.sm_90a.cubin").read_bytes())
    data[18:20] = (62).to_bytes(2, "little")
    with pytest.raises(BuildError, match="EM_X86_64"):
        read_cubin(bytes(data))
