"""All compute primitives of `hw.api.Ops` on a GPU. Which library serves which op stands in the file of its role.

    attention     mla_decode     FlashMLA (bf16, latent 512 + rope 64, pages of 64, more than a few queries); else Triton
                  latent_write, latent_gather    Triton
    prefill       mla_prefill, merge_attention    Triton; a kernel for Hopper (bf16, 192 and 128 dims), and one for the rest
    absorb        absorb_query, unabsorb    Triton for few tokens in bf16; else cuBLAS and Triton
    gemm          linear                 Triton for few rows (bf16, fp8); DeepGEMM (fp8); else cuBLAS, of dequantised weights if need be
                  expand_latent          cuBLAS
                  grouped_linear         CUTLASS through torch (bf16); fp8: DeepGEMM; else Triton
                  grouped_linear_masked  Triton for few rows; DeepGEMM (bf16 of some size, fp8); else Triton
    fused_gate_up, fused_down            Triton
    elementwise, gate, sampling          Triton

No op waits for the device, except that a throughput dispatch brings its counts to the host. Ops that take host lists copy them over.
"""

from types import ModuleType

from hw.cuda.absorb import AbsorbOps
from hw.cuda.attention import AttentionOps
from hw.cuda.elementwise import ElementwiseOps
from hw.cuda.fused_experts import FusedExpertOps
from hw.cuda.gate import GateOps
from hw.cuda.gemm import GemmOps
from hw.cuda.prefill import PrefillOps
from hw.cuda.sampling import SamplingOps


class CudaOps(AttentionOps, PrefillOps, AbsorbOps, GemmOps, FusedExpertOps, ElementwiseOps, GateOps, SamplingOps):
    """See `hw.api.Ops`. Without a library its shapes run on the composites, which is what the tests compare them with."""

    def __init__(self, *, flash_mla: ModuleType | None, deep_gemm: ModuleType | None):
        AttentionOps.__init__(self, flash_mla)
        GemmOps.__init__(self, deep_gemm)
