"""Run ``benchmarks.swap.swaps``."""

from benchmarks.swap.swaps import main

if __name__ == "__main__":
    main()
