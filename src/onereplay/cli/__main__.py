"""`python -m onereplay.cli`, where the script is not on the path."""

from onereplay.cli import main

if __name__ == "__main__":
    main()
