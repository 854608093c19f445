"""Run ``benchmarks.ledger.moves``."""

from benchmarks.ledger.moves import main

if __name__ == "__main__":
    main()
