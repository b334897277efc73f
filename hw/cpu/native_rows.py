"""The state of rows by the kernels of `csrc/rows.cpp`."""

import torch

from hw.cpu.native import Kernels


class NativeRows:
    """See `hw.row_kernels.RowKernels`."""

    def __init__(self, kernels: Kernels):
        self._kernels = kernels

    def lay_out(self, lens, ahead, rows, page_table, num_pages, *, query_len, place, shift, page_size, max_model_len):
        num_seqs, num_tokens = rows.shape[0], rows.shape[0] * query_len
        token_ids, positions, slots = (torch.empty(num_tokens, dtype=torch.int64) for _ in range(3))
        seq_lens = torch.empty(num_seqs, dtype=torch.int32)
        self._kernels.lay_out(
            lens.data_ptr(), ahead.data_ptr(), ahead.stride(0), lens.shape[0] - 1, rows.data_ptr(), num_seqs, page_table.data_ptr(),
            page_table.stride(0), page_table.shape[1], num_pages.data_ptr(), query_len, place, shift, page_size, max_model_len,
            token_ids.data_ptr(), positions.data_ptr(), slots.data_ptr(), seq_lens.data_ptr(),
        )  # fmt: skip
        return token_ids, positions, slots, seq_lens

    def settle(self, lens, ahead, rows, tokens, num_decode, query_len):
        accepted, latest = torch.empty(num_decode, dtype=torch.int64), torch.empty(num_decode, dtype=torch.int64)
        self._kernels.settle(
            lens.data_ptr(), ahead.data_ptr(), ahead.stride(0), rows.data_ptr(), rows.shape[0], tokens.data_ptr(), num_decode, query_len,
            accepted.data_ptr(), latest.data_ptr(),
        )  # fmt: skip
        return accepted, latest

    def best(self, logits):
        logits = logits.contiguous()
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        self._kernels.argmax(logits.data_ptr(), *logits.shape, tokens.data_ptr())
        return tokens
