"""Translation of verl's keys, so that verl's run scripts start megarl unchanged."""
