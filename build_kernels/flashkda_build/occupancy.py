"""How many CTAs of a kernel fit on one SM. The same limits hold for compute capability 9.0, 10.0 and 10.3."""

WARP = 32
WARPS_PER_SM = 64
CTAS_PER_SM = 32
REGISTERS_PER_SM = 65536
REGISTER_UNIT = 256  # registers are given to a warp in units of 8 a lane
WARP_UNIT = 4  # one scheduler's register file each
SHARED_MEMORY_PER_SM = 228 * 1024
SHARED_MEMORY_PER_CTA = 227 * 1024
RESERVED_PER_CTA = 1024
SHARED_MEMORY_UNIT = 128


def ctas_per_sm(threads: int, registers: int, shared_memory: int) -> int:
    """threads a CTA, registers a thread, shared_memory: bytes a CTA, static and dynamic. 0: it cannot be launched."""
    if shared_memory > SHARED_MEMORY_PER_CTA:
        return 0
    warps = -(-threads // WARP)
    registers_per_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    warps_by_registers = REGISTERS_PER_SM // registers_per_warp // WARP_UNIT * WARP_UNIT
    shared = -(-(shared_memory + RESERVED_PER_CTA) // SHARED_MEMORY_UNIT) * SHARED_MEMORY_UNIT
    return min(CTAS_PER_SM, WARPS_PER_SM // warps, warps_by_registers // warps, SHARED_MEMORY_PER_SM // shared)
