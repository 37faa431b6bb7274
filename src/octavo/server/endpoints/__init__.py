"""The routes of the server itself, one family in each file: a module has a `router`, and `app` finds it.

A module may define `PUBLIC_PATHS`: paths that need no API key because they contain no user's data, such as a static
page. A path ending in `/` includes all paths below it. `IMAGE_PATHS`: paths whose bodies may hold images.
"""
