"""Design table of the toy kernels."""

from flashkda_build.expectations import Expectation

EXPECTATIONS = {
    ("prepare", None): Expectation(counts={"fp32 mul": 1}),
    ("recurrence", 32): Expectation(counts={"fp32 mul": 1}),
    ("recurrence", None): Expectation(counts={}),
}
