"""Run ``benchmarks.gpus.together``."""

from benchmarks.gpus.together import main

if __name__ == "__main__":
    main()
