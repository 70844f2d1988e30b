"""Times the primitives beside rlox 1.2, the PyTorch code TRL uses, and NumPy, in one run on equal threads.

    pip install -e '.[peers]' && python benchmarks/primitives.py [--threads 2] [--seconds 0.5]

Contenders take turns, so that what else the machine does meets all of them; figures are medians in
microseconds, results included (a new array is allocated inside the timing). Each result is compared with
float64 NumPy before anything is timed.
"""

import argparse
import os
import random
import statistics
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--seconds", type=float, default=0.5, help="per contender and row")
arguments = parser.parse_args()
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "WHET_NUM_THREADS"):
    os.environ[name] = str(arguments.threads)

import numpy as np  # noqa: E402
import rlox  # noqa: E402
import torch  # noqa: E402

import whet  # noqa: E402

torch.set_num_threads(arguments.threads)
rng = np.random.default_rng(0)


def medians(contenders):
    """name -> median microseconds per call.

    A turn starts with 10 ms that do not count: threads of the contender before it may still be spinning.
    """
    loops, times = {}, {name: [] for name in contenders}
    for name, call in contenders.items():
        call()
        start = time.perf_counter()
        call()
        loops[name] = max(1, int(1e-4 / max(time.perf_counter() - start, 1e-7)))
    end = time.perf_counter() + arguments.seconds * len(contenders)
    order = list(contenders)
    while time.perf_counter() < end or len(times[order[0]]) < 3:
        random.shuffle(order)
        for name in order:
            call, n = contenders[name], loops[name]
            begin = time.perf_counter()
            while (start := time.perf_counter()) < begin + 0.02:
                for _ in range(n):
                    call()
                if start > begin + 0.01:
                    times[name].append((time.perf_counter() - start) / n * 1e6)
            if not times[name]:  # slower than a turn
                start = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(ts) for name, ts in times.items()}


def row(title, contenders, expected, tolerance):
    """Checks, times and prints one row; whet's contenders come first."""
    for name, call in contenders.items():
        np.testing.assert_allclose(
            np.asarray(call(), np.float64), expected, rtol=tolerance, atol=tolerance, err_msg=name
        )
    us = medians(contenders)
    fastest = min(v for name, v in us.items() if not name.startswith("whet"))
    cells = "  ".join(f"{name} {v:9.2f}" for name, v in us.items())
    print(f"{title:22s} {cells}  | fastest other / whet {fastest / us[next(iter(us))]:5.2f}", flush=True)
    return us


def trl_advantages(rewards, group_size):
    grouped = rewards.view(-1, group_size)
    mean = grouped.mean(dim=1).repeat_interleave(group_size)
    return (rewards - mean) / (grouped.std(dim=1).repeat_interleave(group_size) + 1e-4)


def numpy_advantages(rewards, group_size):
    grouped = rewards.reshape(-1, group_size)
    return ((grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, keepdims=True) + 1e-8)).ravel()


def torch_k3(p, q):
    r = q - p
    return (torch.exp(r) - r - 1).sum(-1)


def numpy_k3(p, q):
    r = q - p
    return (np.exp(r) - r - 1).sum(-1)


def trl_logprobs(logits, ids):
    """What TRL's selective_log_softmax computes for float32."""
    picked = torch.gather(logits, -1, ids[:, None])[:, 0]
    return picked - torch.stack([torch.logsumexp(one, -1) for one in logits])


print(
    f"whet {whet.isa()}, {arguments.threads} threads; torch {torch.__version__}, numpy {np.__version__}; microseconds\n"
)

print("Group advantages (rlox and whet float64; TRL divides by the sample deviation, so it is not compared)")
for prompts, size in ((16, 4), (64, 8), (256, 16), (1024, 32)):
    r = rng.normal(size=prompts * size)
    r32 = r.astype(np.float32)
    t = torch.from_numpy(r32)
    us = row(
        f"{prompts} x {size}",
        {
            "whet": lambda r=r, g=size: whet.compute_batch_group_advantages(r, g),
            "whet f32": lambda r=r32, g=size: whet.compute_batch_group_advantages(r, g),
            "whet torch": lambda r=t, g=size: whet.compute_batch_group_advantages(r, g),
            "rlox": lambda r=r, g=size: rlox.compute_batch_group_advantages(r, g),
            "TRL": lambda r=t, g=size: trl_advantages(r, g),
            "NumPy": lambda r=r, g=size: numpy_advantages(r, g),
        },
        numpy_advantages(r, size),
        0.5,
    )
    extra = us["whet torch"] - us["whet f32"]
    print(f"{'':22s} rlox / whet {us['rlox'] / us['whet']:.2f}; a torch tensor costs {extra:.2f}")

print("\nToken KL, Schulman")


def k3_row(batch, length):
    p = -rng.exponential(1, (batch, length))
    q = p + rng.normal(0, 0.5, p.shape)
    p64, q64, p32, q32 = p.ravel(), q.ravel(), p.astype(np.float32).ravel(), q.astype(np.float32).ravel()
    tp, tq = torch.from_numpy(p32), torch.from_numpy(q32)
    shape = (batch, length) if batch > 1 else (length,)
    tail = (length,) if batch > 1 else ()
    name = "compute_batch_token_kl_schulman" if batch > 1 else "compute_token_kl_schulman"
    ours, theirs, theirs32 = getattr(whet, name), getattr(rlox, name), getattr(rlox, name + "_f32")
    calls = {
        "whet f32": lambda: ours(p32, q32, *tail),
        "whet f64": lambda: ours(p64, q64, *tail),
        "whet torch": lambda: ours(tp, tq, *tail),
        "rlox f32": lambda: theirs32(q32, p32, *tail),  # its r is log p - log q: the other direction
        "rlox f64": lambda: theirs(q64, p64, *tail),
        "torch f32": lambda: torch_k3(tp.view(shape), tq.view(shape)),
        "NumPy f64": lambda: numpy_k3(p64.reshape(shape), q64.reshape(shape)),
    }
    us = row(f"{batch} x {length}", calls, numpy_k3(p.reshape(shape), q.reshape(shape)), 1e-4)
    print(
        f"{'':22s} rlox f32 / whet f32 {us['rlox f32'] / us['whet f32']:.2f}; torch / whet f32 "
        f"{us['torch f32'] / us['whet f32']:.2f}; best f64 / whet f64 "
        f"{min(us['rlox f64'], us['NumPy f64']) / us['whet f64']:.2f}; a torch tensor costs "
        f"{us['whet torch'] - us['whet f32']:.2f}"
    )


for batch, length in ((1, 128), (1, 512), (1, 2048), (1, 8192), (32, 128), (32, 512), (32, 2048)):
    k3_row(batch, length)

print("\nToken KL, exact, float64")
for length in (128, 512, 2048, 8192):
    p = -rng.exponential(1, length)
    q = p + rng.normal(0, 0.5, length)
    tp, tq = torch.from_numpy(p), torch.from_numpy(q)
    row(
        f"{length}",
        {
            "whet": lambda p=p, q=q: whet.compute_token_kl(p, q),
            "rlox": lambda p=p, q=q: rlox.compute_token_kl(p, q),
            "torch": lambda p=tp, q=tq: torch.sum(torch.exp(p) * (p - q)).item(),
            "NumPy": lambda p=p, q=q: np.sum(np.exp(p) * (p - q)),
        },
        np.sum(np.exp(p) * (p - q)),
        1e-9,
    )

print("\nToken log-probabilities, 256 x 49,152")
logits, ids = torch.randn(256, 49152), torch.randint(0, 49152, (256,))
half = logits.bfloat16()
expected = torch.log_softmax(logits.double(), -1).gather(1, ids[:, None])[:, 0].numpy()
us = row(
    "float32",
    {"whet": lambda: whet.compute_token_logprobs(logits, ids), "TRL": lambda: trl_logprobs(logits, ids)},
    expected,
    1e-5,
)
memory = torch.ones(1 << 28)
read = medians({"read": lambda: memory.sum()})["read"]
print(
    f"{'':22s} whet reads {logits.nbytes / us['whet'] / 1e3:.1f} GB/s; torch's sum of 1 GiB reads "
    f"{memory.nbytes / read / 1e3:.1f} GB/s"
)
with_entropy = medians({"entropy": lambda: whet.compute_token_logprobs(logits, ids, return_entropy=True)})["entropy"]
in_half = medians({"bf16": lambda: whet.compute_token_logprobs(half, ids)})["bf16"]
print(f"{'':22s} with entropy {with_entropy:.0f}; bf16 {in_half:.0f}")

print("\nGAE, 2,048 steps, float64")
r, v = rng.normal(size=(2, 2048))
done = rng.random(2048) < 0.01
done_as_float = done.astype(float)
row(
    "1 x 2048",
    {
        "whet": lambda: whet.compute_gae(r, v, done, 0.0, 0.99, 0.95)[0],
        "rlox": lambda: rlox.compute_gae(r, v, done_as_float, 0.0, 0.99, 0.95)[0],
    },
    whet.ops.advantages.naive_gae(r, v, done, 0.0, 0.99, 0.95)[0],
    1e-9,
)
