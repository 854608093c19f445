"""Run ``benchmarks.windows.modelled``."""

from benchmarks.windows.modelled import main

if __name__ == "__main__":
    main()
