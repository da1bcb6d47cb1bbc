"""The audit: what trainer and sampler really hold, against the contract. A difference is an error that names both."""

from dataclasses import dataclass

import torch

from kit.precision import PrecisionError


class AuditError(PrecisionError):
    """A realised dtype differs from the contract."""


@dataclass(frozen=True)
class AuditRow:
    """One line of the audit: what it is, which side has it, what the contract wants, what was found."""

    what: str
    side: str
    contract: str
    realised: str

    @property
    def agrees(self) -> bool:
        """True when the found value is the wanted one."""
        return self.contract == self.realised


@dataclass(frozen=True)
class Audit:
    """All rows; prints as a table in a terminal and in a notebook."""

    rows: tuple[AuditRow, ...]

    @property
    def differences(self) -> tuple[AuditRow, ...]:
        """Rows that break the contract."""
        return tuple(row for row in self.rows if not row.agrees)

    def __str__(self):
        cells = [("", "side", "contract", "realised", "")]
        cells += [(r.what, r.side, r.contract, r.realised, "ok" if r.agrees else "DIFFERS") for r in self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)

    def _repr_html_(self):
        head = "<tr><th></th><th>side</th><th>contract</th><th>realised</th><th></th></tr>"
        lines = [
            f"<tr><td>{r.what}</td><td>{r.side}</td><td>{r.contract}</td><td>{r.realised}</td>"
            f"<td>{'✓' if r.agrees else '<b>differs</b>'}</td></tr>"
            for r in self.rows
        ]
        return f"<table>{head}{''.join(lines)}</table>"


def audit(trainer) -> Audit:
    """Read back every dtype of a `GRPOTrainer` and of its sampler.

    Returns:
        The table, when everything agrees.

    Raises:
        AuditError: naming each side, what the contract wants and what was found.
    """
    contract = trainer.loaded.precision.contract()
    realised = {**_trainer_dtypes(trainer), **trainer.sampler.realised()}
    rows = []
    for what, wanted in contract.items():
        side = "sampler" if what.startswith("sampler") or what == "kv_cache" else "trainer"
        rows.append(AuditRow(what.removeprefix("sampler_"), side, _word({wanted}), _word(realised[what])))
    result = Audit(tuple(rows))
    if result.differences:
        wrong = "; ".join(
            f"{r.side} {r.what}: contract {r.contract}, realised {r.realised}" for r in result.differences
        )
        raise AuditError(
            f"Trainer and sampler break the {trainer.loaded.precision.name} contract: {wrong}. Build both with one "
            f"FastLanguageModel.from_pretrained(dtype=...) call, and leave their dtypes alone after it.\n{result}"
        )
    return result


def _trainer_dtypes(trainer):
    parameters = list(trainer.model.named_parameters())
    floating = [(p.dtype, p.requires_grad) for _, p in parameters if p.is_floating_point()]
    device = trainer.accelerator.device.type
    with trainer.accelerator.autocast():
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return {
        "base_weights": {dtype for dtype, trainable in floating if not trainable},
        "adapters": {dtype for dtype, trainable in floating if trainable},
        "autocast": {autocast},
        "loss_scaling": {trainer.accelerator.scaler is not None and trainer.accelerator.scaler.is_enabled()},
        "logits": {_logits_dtype(trainer)},
    }


def _logits_dtype(trainer):
    """Dtype of the head's product, seen by a hook in a forward pass of one token."""
    seen = []
    head = trainer.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    try:
        with torch.no_grad(), trainer.accelerator.autocast():
            trainer.model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=trainer.accelerator.device))
    finally:
        handle.remove()
    return seen[0]


def _word(values):
    """A set of dtypes or flags in words; None is "off"."""
    words = {"off" if v is None else str(v).removeprefix("torch.").lower() for v in values}
    return " and ".join(sorted(words)) or "none"
