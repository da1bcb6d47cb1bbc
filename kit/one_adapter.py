"""LoRA arithmetic of the engine on a CPU: two matrix products an adapter, in place of a gather for every row.

vLLM 0.31 looks its adapters up token by token, which is more than half of a decode step of a small model; a run has one
adapter. It also gives rows without an adapter that of the last slot while decoding (index -1). Here rows of one adapter
are multiplied together and rows without are left alone. Same arithmetic: float32 products and sums, rounded when they
are added. Loaded by vLLM, through the name that its platform gives (`kit.engine`).
"""

from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class OneAdapterCPU(PunicaWrapperCPU):
    """vLLM's CPU wrapper with another way through a linear layer, fastest where every row has the same adapter."""

    def update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs):
        """Note which slots the next batch uses."""
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        in_use = set(mapping.index_mapping)
        self._slots = [lora_index_to_id.index(adapter) for adapter in sorted(in_use - {0})]  # 0: no adapter
        self._is_one = len(in_use) == 1

    def add_lora_linear(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs) -> None:
        """y[:, part i] += scale * (x A_i^T) B_i^T for each part i of a packed projection, in place.

        Args:
            y: (tokens, outputs); x: (tokens, inputs).
            lora_a_stacked, lora_b_stacked: for each part, (slots, 1, rank, inputs) and (slots, 1, outputs, rank).
            scale: 1.0 in vLLM, which keeps an adapter's scaling in B.
            output_slices: outputs of each part; they follow one another in y.
        """
        inputs = x.float()
        for slot in self._slots:
            rows = slice(None) if self._is_one else self.token_lora_indices == slot
            start = 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                low_rank = inputs[rows] @ a[slot, 0].float().t()
                y[rows, start : start + size] += (low_rank @ b[slot, 0].float().t()).mul_(scale).to(y.dtype)
                start += size
