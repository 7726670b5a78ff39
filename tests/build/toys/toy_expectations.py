"""Design table of the toy kernels."""

from flashkda_build.expectations import Expectation

EXPECTATIONS = {
    ("prepare", None, "a"): Expectation(counts={"fp32 mul": 1}),
    ("recurrence", 32, "a"): Expectation(counts={"fp32 mul": 1}),
    ("recurrence", None, "a"): Expectation(counts={}),
}
