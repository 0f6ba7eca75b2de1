"""The figures of machines from their data sheets, and the share of the peak that training attains.

>>> HARDWARE["h100"].memory
80000000000

The peak is what the arithmetic units could do if nothing ever waited. `attained`, the share that large
products reach, is set so that a whole step agrees with a published training on that device;
`tests/scale/time/test_step_time.py` checks that. Links have the rates that NCCL reaches, not those of the
wires. Rates between hosts are one rank's share of the network cards. On a TPU or Trainium a rank is a chip.
minidist does not run on these; a plan for one is for the library that the machine `needs`.

Sources: the `source` and `attained_source` of each machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from minidist.comm.cost.links import PROFILES, Link, LinkProfile
from minidist.scale.time.rates import Hardware, Rates

MEMORY = 0.8
"""Share of an accelerator's published memory bandwidth that operators between products reach."""
CALL = 6e-6
"""Seconds that PyTorch takes to call an operator and launch its kernel, which runs asynchronously."""
ATTENTION = 0.5
"""Rate of fused attention over that of large matrix products. Dao 2023, "FlashAttention-2", figure 5: about
half, forward and backward, with heads of 64 to 128."""
HOP, NETWORK_HOP = 3.4e-6, 14e-6
"""Seconds of a hop within a host, and between hosts, in NCCL's model (src/graph/tuning.cc, ring, Simple)."""


ICI_HOP = 1e-6
"""Seconds of a hop between neighbours in a TPU's torus: an assumption."""


def _device(
    name: str,
    source: str,
    peak: Mapping[str, float],
    attained: float,
    attained_source: str,
    memory: int,
    bandwidth: float,
    inside: tuple[str, float],
    between: tuple[str, float],
    joined: int = 8,
    domain: str = "host",
    hop: float = HOP,
    needs: str = "",
) -> Hardware:
    """A GPU, TPU or Trainium. `inside` and `between` have the bytes per second that one rank sends.

    A compiler makes one program of all operators for a TPU or Trainium, so that calls take no time there.
    """
    call = 0.0 if needs else CALL
    add = 3 / bandwidth  # a sum reads two operands and writes one
    return Hardware(
        name,
        source,
        peak,
        attained,
        attained_source,
        memory,
        bandwidth,
        joined,
        LinkProfile(f"inside a {domain} of {name}", inside[0], {"messages": Link(hop, 1 / inside[1])}, add),
        LinkProfile(
            f"between {domain}s of {name}", between[0], {"messages": Link(NETWORK_HOP, 1 / between[1])}, add
        ),
        rates=Rates(
            {precision: attained * rate for precision, rate in peak.items()},
            ATTENTION,
            MEMORY * bandwidth,
            MEMORY * bandwidth,
            call,
            call,
            tensor=0.0,
            asynchronous=True,
        ),
        domain=domain,
        needs=needs,
    )


_LLAMA = (
    'Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 4: 380 to 430 TFLOP/s a GPU, 38 to 43% of '
    "the peak, on 8192 and 16384 H100s"
)
_MEGATRON = (
    "Narayanan et al. 2021, table 1: a GPT of 1.7 billion parameters, with recomputation, at 137 TFLOP/s "
    "on each of 32 A100s, 44% of the peak"
)
_XLA = "JAX or torch-xla"
_BOOK = '(Austin et al. 2025, "How to Scale Your Model", part 2)'
_RING = "both links of a ring along one axis of the torus"
_XEON_CORES, _XEON_CLOCK = 56, 2.0e9

HARDWARE: dict[str, Hardware] = {
    each.name: each
    for each in (
        *(
            _device(
                name,
                f"NVIDIA {name.upper()} datasheet, SXM: half of the figures with sparsity",
                {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12},
                0.55,
                _LLAMA,
                gigabytes * 10**9,
                bandwidth,
                ("NVLink 4, 450 GB/s each way; NCCL reaches 370 (NVIDIA/nccl-tests issue 212)", 370e9),
                ("InfiniBand NDR, 400 Gbit/s per GPU, of which 97% carry data", 48.5e9),
            )
            for name, gigabytes, bandwidth in (("h100", 80, 3.35e12), ("h200", 141, 4.8e12))
        ),
        *(
            _device(
                name,
                f"NVIDIA A100 datasheet, {gigabytes} GB SXM, without sparsity",
                {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
                0.6,
                _MEGATRON,
                gigabytes * 10**9,
                bandwidth,
                ("NVLink 3, 300 GB/s each way; NCCL reaches 230 (NVIDIA/nccl-tests issue 149)", 230e9),
                ("InfiniBand HDR, 200 Gbit/s per GPU, of which 94% carry data", 23.5e9),
            )
            for name, gigabytes, bandwidth in (("a100", 80, 2.039e12), ("a100-40gb", 40, 1.555e12))
        ),
        _device(
            "v100-16gb",
            "NVIDIA V100 datasheet, 16 GB SXM2; no bfloat16",
            {"fp16": 125e12, "fp32": 15.7e12},
            0.5,
            'NVIDIA, "MegatronLM\'s Supercharged V1.0": a GPT of 1.2 billion parameters at 62.4 TFLOP/s with '
            "its own kernels, 48% of the peak, and 39 TFLOP/s before",
            16 * 10**9,
            900e9,
            ("NVLink 2, 150 GB/s each way; NCCL counts on 120 (its src/graph/topo.h)", 120e9),
            ("four InfiniBand EDR cards of 100 Gbit/s for eight GPUs, as in a DGX-1", 6e9),
        ),
        _device(
            "t4",
            "NVIDIA T4 datasheet; no bfloat16",
            {"fp16": 65e12, "fp32": 8.1e12},
            0.35,
            "an assumption: less than a V100's, since its clock falls under load at 70 W (Jia et al. 2019, "
            '"Dissecting the NVidia Turing T4 GPU via Microbenchmarking", chapter 4)',
            16 * 10**9,
            320e9,
            ("PCI Express 3 x16, 12 GB/s in NCCL's src/graph/topo.h", 12e9),
            ("100 Gbit/s for eight GPUs", 1.5e9),
        ),
        _device(
            "tpu-v4",
            "Google Cloud documentation, TPU v4, and Jouppi et al. 2023; the figures are for bfloat16 alone",
            {"bf16": 275e12},
            0.65,
            'Chowdhery et al. 2022, "PaLM", section 4: 46.2% of the peak on 6144 chips, and 57.8% with what '
            "is computed twice",
            32 * 2**30,
            1.2e12,
            (f"{_RING}, 45 GB/s a link {_BOOK}", 90e9),
            (f"25 GB/s for the four chips of a host {_BOOK}", 6.25e9),
            joined=4096,
            domain="pod",
            hop=ICI_HOP,
            needs=_XLA,
        ),
        _device(
            "tpu-v5e",
            "Google Cloud documentation, TPU v5e; the figures are for bfloat16 alone",
            {"bf16": 197e12},
            0.75,
            "MaxText, configs/v5e: 56 to 67% of the peak on 256 chips, with 16 to 128 billion parameters",
            16 * 10**9,
            819e9,
            (f"{_RING}, 50 GB/s a link (1,600 Gbit/s for four)", 100e9),
            ("two cards of 100 Gbit/s for the eight chips of a host", 3.125e9),
            joined=256,
            domain="pod",
            hop=ICI_HOP,
            needs=_XLA,
        ),
        *(
            _device(
                name,
                f"AWS Neuron documentation, {instance}, a rank per chip",
                {"bf16": peak, "fp16": peak, "fp32": single},
                0.45,
                "an assumption: no published share of the peak was found",
                gibibytes * 2**30,
                bandwidth,
                (f"{link} GiB/s a chip, an assumption: in both directions together", link / 2 * 2**30),
                (f"EFA, {network} Gbit/s for the 16 chips of an instance", network * 1e9 / 8 / 16),
                joined=16,
                needs="the AWS Neuron SDK",
            )
            for name, instance, peak, single, gibibytes, bandwidth, link, network in (
                ("trainium", "trn1.32xlarge", 190e12, 47.5e12, 32, 0.82e12, 384, 800),
                ("trainium2", "trn2.48xlarge", 667e12, 181e12, 96, 2.9e12, 1024, 3200),
            )
        ),
        Hardware(
            "cpu-xeon-8480",
            "Intel's specification of the Xeon Platinum 8480+, a rank per socket: 56 cores at the base clock "
            "of 2 GHz, two AVX-512 units (64 operations per cycle) and AMX (2048 in bfloat16), 8 channels of "
            "DDR5-4800",
            {"fp32": _XEON_CORES * _XEON_CLOCK * 64, "bf16": _XEON_CORES * _XEON_CLOCK * 2048},
            0.5,
            "an assumption: MKL's large products reach nine tenths of the peak on one core, and the smaller "
            "products of layers on many cores reach less",
            256 * 10**9,
            307.2e9,
            2,
            LinkProfile(
                "between sockets",
                "an assumption: a copy through memory by one core, 10 GB/s",
                {"messages": Link(5e-6, 1e-10)},
                3 / 307.2e9,
            ),
            PROFILES["100gbe"],
            rates=Rates(
                {
                    "fp32": 0.5 * _XEON_CORES * _XEON_CLOCK * 64,
                    "bf16": 0.25 * _XEON_CORES * _XEON_CLOCK * 2048,
                },
                0.5,
                0.6 * 307.2e9,
                0.6 * 307.2e9,
                1e-5,
                5e-6,
                tensor=1e-4,
            ),
        ),
    )
}
"""Machines by name."""
