"""``python -m paceline``: see ``python -m paceline --help``."""

from paceline._run import main

if __name__ == "__main__":
    main()
