"""``python -m nsightkit`` is the installed command."""

from nsightkit.cli import main

if __name__ == "__main__":
    main()
