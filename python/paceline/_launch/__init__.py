"""How a process joins the world: from the variables that its launcher has set."""
