"""Run ``benchmarks.vllm.comparison``."""

from benchmarks.vllm.comparison import main

if __name__ == "__main__":
    main()
