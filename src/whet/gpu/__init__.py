"""The forward pass on a GPU by WebGPU: Metal, Vulkan and Direct3D 12, through the package ``wgpu``.

The core makes a plan of buffers, kernels and dispatches (cpp/gpu/plan.h), ``whet.gpu.program`` runs it. The kernels are
WGSL files in ``kernels``.
"""
