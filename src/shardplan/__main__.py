"""`python -m shardplan` is the command `shardplan`."""

from shardplan.cli import main

if __name__ == "__main__":
    main()
