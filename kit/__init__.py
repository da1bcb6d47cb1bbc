"""What does the number format do to reinforcement learning? A notebook training kit: fp16 against bf16, measured.

The public names are listed below with the module that defines each. They are imported on first use, so that
`import kit` costs milliseconds and a notebook can pin versions before torch, vLLM or TRL is loaded.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "Precision": "kit.precision",
    "FastLanguageModel": "kit.loading",
    "GRPOConfig": "kit.trainer",
    "GRPOTrainer": "kit.trainer",
    "audit": "kit.audit",
    "mismatch_metrics": "kit.mismatch",
    "compare_distributions": "kit.distributions",
    "evaluate": "kit.evaluation",
    "Run": "kit.records",
    "RunWriter": "kit.records",
    "LiveView": "kit.live",
    "training_figure": "kit.plots",
    "summary_text": "kit.plots",
    "arithmetic": "kit.arithmetic",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'kit' has no attribute {name!r}; it offers {', '.join(__all__)}")
    module = import_module(_HOME[name])
    value = module if _HOME[name] == f"kit.{name}" and not hasattr(module, name) else getattr(module, name)
    globals()[name] = value
    return value


def __dir__():
    return __all__
