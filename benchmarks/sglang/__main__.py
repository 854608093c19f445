"""Run ``benchmarks.sglang.comparison``."""

from benchmarks.sglang.comparison import main

if __name__ == "__main__":
    main()
