"""Base weights once: the trainer's frozen parameters as views of vLLM's tensors.

vLLM keeps some projections packed (q, k and v as rows of one matrix); which ones, and how many rows each part has, is
read from the model it built (`packed_modules_mapping` and each layer's `output_sizes`), so any family that follows that
convention is shared. Whatever does not fit falls back to a second copy, with the reason.
"""

import torch


class CannotShare(RuntimeError):
    """Why this model's weights cannot be shared; the caller loads a second copy."""


def shared_model(path: str, sampler, precision):
    """A transformers model whose frozen parameters are views of the sampler's.

    Args:
        path: the model's folder (its configuration; no weights are read).
        sampler: a `VLLMSampler` of the same folder and contract, on a GPU.
        precision: the contract.

    Raises:
        CannotShare: not on a GPU, quantised or repacked weights, or a name or shape that has no counterpart.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not torch.cuda.is_available():
        raise CannotShare("on a CPU vLLM repacks its weights for the CPU's kernels")
    sources = sampler.llm.apply_model(named_views)[0]
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=precision.base_weights)
    for name, parameter in list(model.named_parameters()):
        view = _matching_view(name, parameter, sources)
        module = model.get_submodule(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], torch.nn.Parameter(view, requires_grad=False))
    model.tie_weights()
    _rebuild_buffers(model, config)
    return model.eval()


def named_views(model) -> dict[str, torch.Tensor]:
    """Checkpoint name -> tensor inside the engine, packed projections cut into their parts. Copies nothing."""
    packed = getattr(model, "packed_modules_mapping", {})
    views = {}
    for module_name, module in model.named_modules():
        name = module_name.replace(".base_layer", "")
        parent, _, leaf = name.rpartition(".")
        for kind, tensor in module.named_parameters(recurse=False):
            if leaf not in packed:
                views[f"{name}.{kind}"] = tensor.data
                continue
            parts = packed[leaf]
            pieces = tensor.data.split(list(module.output_sizes), dim=0)
            views |= {f"{parent}.{part}.{kind}": piece for part, piece in zip(parts, pieces, strict=True)}
    return views


def addresses(model) -> set[int]:
    """Storage addresses of a model's parameters, to prove that two models share them."""
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


def _matching_view(name, parameter, sources):
    if name not in sources:
        raise CannotShare(f"vLLM has no counterpart of {name}")
    view = sources[name]
    if view.dtype != parameter.dtype:
        raise CannotShare(f"{name} is {view.dtype} in vLLM and {parameter.dtype} in the contract")
    if view.shape != parameter.shape:
        view = view[: parameter.shape[0]]  # vLLM pads the vocabulary
    if view.shape != parameter.shape:
        raise CannotShare(f"{name} has shape {tuple(sources[name].shape)} in vLLM, {tuple(parameter.shape)} here")
    return view


def _rebuild_buffers(model, config):
    """Buffers that no checkpoint holds (rotary frequencies) are computed anew, on the GPU."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], type(module)(config=config).to("cuda"))
    left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if left:
        raise CannotShare(f"{', '.join(left[:3])} could not be rebuilt")
