"""Adapters: records of how to read a published PRM, which its own files do not define.

`jprm.load(FOLDER)` recognises the adapter from the folder's files. `published.PUBLISHED` holds the known records; a
file `adapter.json` in the folder is the user's own.
"""
