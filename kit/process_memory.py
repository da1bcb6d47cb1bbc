"""Memory of this process, or of the GPU when there is one: in use, at its peak, and giving back what was freed."""

import ctypes

import torch


def return_freed_memory():
    """Give what was freed back to the system; glibc keeps 0.1 GiB a load of the bundled model otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim:
        trim(0)


def used_memory_gib() -> float:
    """Memory in use: of the GPU when there is one, else of this process [GiB]."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    import psutil

    return psutil.Process().memory_info().rss / 2**30


def peak_memory_gib() -> float:
    """Peak memory: allocated on the GPU when there is one, else resident in this process [GiB]."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
