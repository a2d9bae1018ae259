"""Programs of others on our libraries: what their environment says, and how they are started."""
