"""`saltus train assd` as a program; `python recipes/assd.py --help` lists its options."""

from saltus.methods.assd.training.command import main

if __name__ == "__main__":
    main()
