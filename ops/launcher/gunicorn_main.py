"""gunicorn's command, without the current folder on `sys.path`: a file there could replace a dependency."""

import os

from gunicorn.app.wsgiapp import WSGIApplication


class RouterApplication(WSGIApplication):  # type: ignore[misc] # gunicorn has no types
    """The router under gunicorn, with gunicorn's own command line."""

    def chdir(self) -> None:
        """Change to the configured folder. gunicorn's own method also puts it first on `sys.path`."""
        os.chdir(self.cfg.chdir)


if __name__ == "__main__":
    RouterApplication("%(prog)s [OPTIONS] [APP_MODULE]").run()
