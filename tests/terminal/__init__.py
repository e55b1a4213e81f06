"""Commands as a user meets them: under a terminal of 80 columns, in a pipe, and interrupted."""
