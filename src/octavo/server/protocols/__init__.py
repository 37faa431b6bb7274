"""The protocols, one in each folder: its requests, its answers, its errors and its routes.

`app` finds the folders, and in them the modules that have a `router`. The files beside the folders are for all of them.
A folder imports no other one, except where one product takes the requests of another.
"""
