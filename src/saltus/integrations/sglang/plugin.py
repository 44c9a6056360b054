"""Register the algorithm SALTUS with SGLang: `--speculative-algorithm SALTUS`."""

from __future__ import annotations

from typing import Any

NAME = "SALTUS"
NUM_DRAFT_TOKENS = 12  # SGLang's default for n-grams: nodes of a tree, the last decided token included
MAX_RUNNING_REQUESTS = 48  # likewise


def register() -> None:
    """SGLang calls this in each of its processes, by the entry point `sglang.srt.plugins`."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # pyright: ignore[reportMissingImports]
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo  # pyright: ignore[reportMissingImports]

    register_with(SpeculativeAlgorithm, CustomSpecAlgo)


def register_with(algorithms: Any, custom_algorithm: type[Any]) -> None:
    """Register with SGLang's `SpeculativeAlgorithm`; `custom_algorithm` is its CustomSpecAlgo."""

    class SaltusAlgorithm(custom_algorithm):
        """SGLang treats it as its n-gram algorithm, from which its worker inherits the call's layout."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            """The settings that SGLang makes for n-grams, and no overlap."""
            server_args.disable_overlap_schedule = True
            server_args.enable_mixed_chunk = False
            if server_args.max_running_requests is None:
                server_args.max_running_requests = MAX_RUNNING_REQUESTS
            if server_args.speculative_num_draft_tokens is None:
                server_args.speculative_num_draft_tokens = NUM_DRAFT_TOKENS
            server_args.speculative_eagle_topk = server_args.speculative_ngram_max_bfs_breadth
            if server_args.speculative_num_steps is None:
                server_args.speculative_num_steps = max(
                    server_args.speculative_num_draft_tokens // server_args.speculative_eagle_topk, 1
                )

    @algorithms.register(NAME, supports_overlap=False, spec_class=SaltusAlgorithm)
    def worker_class(server_args: Any) -> type[Any]:
        from sglang.srt import runtime_context  # pyright: ignore[reportMissingImports]
        from sglang.srt.speculative import ngram_worker  # pyright: ignore[reportMissingImports]

        from saltus.integrations.sglang.worker import saltus_worker, sample_by_match

        ngram_worker.eagle_sample = sample_by_match(ngram_worker.eagle_sample)  # the worker's module calls it by name
        return saltus_worker(ngram_worker.NGRAMWorker, runtime_context)
