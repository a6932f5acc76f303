"""``python -m paceline``: see ``python -m paceline --help``."""

from paceline._cli.main import main

if __name__ == "__main__":
    main()
