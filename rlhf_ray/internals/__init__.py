"""Parts of other libraries that are private or undocumented, and that this project uses nevertheless.

There is one module per library. Each use says which version and file it was read from (Source), which public way is
missing (Missing), and what breaks when it changes (Otherwise). The tests of these modules are the first to fail then.
"""
