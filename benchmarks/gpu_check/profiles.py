"""What a GPU's time goes to, as a row, and in a file that it names."""

from collections.abc import Callable

from benchmarks.gpu_check.rows import Row
from benchmarks.gpu_check.runner import Place
from rlhf_ray.roles.profiling import busiest

KERNELS = 48
"""Lines of the file."""


def profiled(place: Place, name: str, call: Callable[[], float]) -> Row:
    """The kernels of a call, which returns its seconds; in a rehearsal, the operators."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA if place.gpu else ProfilerActivity.CPU], acc_events=True) as made:
        seconds = call()
    every = busiest(made.key_averages(), 10**6)
    total = sum(kernel.own_ms for kernel in every)
    calls = sum(kernel.calls for kernel in every)
    file = (place.results or place.directory) / f"profile_{''.join(c if c.isalnum() else '_' for c in name)}.txt"
    head = f"{name}: {total:.1f} ms in {calls:,} kernels, {1e3 * seconds:.1f} ms by the clock"
    file.write_text("\n".join([head, *(f"{kernel.own_ms:9.2f} ms {kernel.calls:6} x {kernel.name[:160]}"
                                       for kernel in every[:KERNELS])]) + "\n")
    top = ", ".join(f"{kernel.own_ms:.0f} ms {kernel.name[:24]}" for kernel in every[:3])
    return Row(f"{name}: profile", f"{total:.0f} of {1e3 * seconds:.0f} ms, {calls:,} kernels", f"{file.name}: {top}")
