"""The server's own routes, one family per file. A module has a `router`, and `app` finds it.

A module may define `PUBLIC_PATHS`: paths that need no API key because they contain no user data, such as static pages.
A path that ends in `/` includes all paths below it. `IMAGE_PATHS` are the paths whose bodies may contain images.
"""
