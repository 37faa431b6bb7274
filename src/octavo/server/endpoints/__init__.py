"""The server's own routes, one family per file. `app` finds every module that defines a `router`.

A module may define `PUBLIC_PATHS`: paths that need no API key because they contain no user data, such as static pages.
A path that ends in `/` includes all paths below it. `IMAGE_PATHS` are the paths whose bodies may contain images.
"""
