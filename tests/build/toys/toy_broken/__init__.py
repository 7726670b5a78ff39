"""A good variant, then one whose PTX ptxas refuses."""

from dataclasses import replace

import toy_kernels

KERNELS = (toy_kernels.KERNELS[0], replace(toy_kernels.KERNELS[1], module="toy_broken.refused"))
