"""Adapters: records of how a published PRM is read, which its own files do not tell.

`jprm.load(FOLDER)` recognises the record from the folder's files. `published.PUBLISHED` holds the
known records; a file `adapter.json` in the folder is a user's own.
"""
