# Tests of the tests: the core with one injected mistake, which exploring must find.
#
# mutant(NAME FILE PROGRAM FINDING OLD NEW [OLD NEW]...): replaces OLD by NEW in a copy of FILE, which must
# contain it, builds the explorer with that copy, and expects FINDING from the programs named like PROGRAM. A
# header is compiled with the sources named first.

set(mutant_sources_of_calls.h
    cpp/collectives/all_gather.cc cpp/collectives/all_reduce.cc cpp/collectives/all_to_all.cc
    cpp/collectives/broadcast.cc cpp/collectives/calls.cc cpp/collectives/reduce_scatter.cc)
set(mutant_sources_of_wait.h
    cpp/collectives/calls.cc cpp/collectives/point_to_point.cc cpp/core/session.cc cpp/core/wait_failures.cc
    cpp/reducer/end_of_backward.cc cpp/reducer/host_sums.cc)
set(mutant_sources_of_reducer.h
    cpp/reducer/backward_result.cc cpp/reducer/end_of_backward.cc cpp/reducer/overlapping_gradients.cc
    cpp/reducer/plan.cc cpp/reducer/reducer.cc)

set(mutant_sources_of_settled_count.h cpp/reducer/end_of_backward.cc cpp/reducer/host_sums.cc)

function(mutant name file program finding)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/mutants/${name})
  file(READ ${PROJECT_SOURCE_DIR}/${file} text)
  set(i 4)
  while(i LESS ARGC)
    set(old "${ARGV${i}}")
    math(EXPR i "${i} + 1")
    set(new "${ARGV${i}}")
    math(EXPR i "${i} + 1")
    string(FIND "${text}" "${old}" at)
    if(at EQUAL -1)
      message(FATAL_ERROR "mutant ${name}: ${file} does not hold \"${old}\". Bring mutants.cmake up to date")
    endif()
    string(REPLACE "${old}" "${new}" text "${text}")
  endwhile()
  string(REGEX REPLACE "^cpp/" "" copy ${file})
  file(GENERATE OUTPUT ${folder}/${copy} CONTENT "${text}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${file})

  get_filename_component(base ${file} NAME)
  set(sources ${folder}/${copy})
  if(DEFINED mutant_sources_of_${base})
    list(TRANSFORM mutant_sources_of_${base} PREPEND ${PROJECT_SOURCE_DIR}/ OUTPUT_VARIABLE sources)
  endif()
  # Linked before the library, whose own version is then left out.
  add_executable(mutant_${name} ${sources})
  target_include_directories(mutant_${name} BEFORE PRIVATE ${folder})
  target_compile_options(mutant_${name} PRIVATE ${copies_are_calls} -O1 -w)
  target_link_libraries(mutant_${name} PRIVATE paceline_programs)
  get_property(first DIRECTORY PROPERTY first_mutant)
  if(first)
    target_precompile_headers(mutant_${name} REUSE_FROM ${first})
  else()
    set_property(DIRECTORY PROPERTY first_mutant mutant_${name})
    target_precompile_headers(mutant_${name} PRIVATE ${standard_headers})
  endif()
  add_test(NAME mutant_${name} COMMAND mutant_${name} 40000 1 ${program})
  set_tests_properties(
    mutant_${name} PROPERTIES TIMEOUT 300 PASS_REGULAR_EXPRESSION "seed [0-9]+, expected steps [0-9]+: ${finding}")
endfunction()

# --- lost wake-ups ---
mutant(no_ring_at_the_end cpp/reducer/reducer.cc "backwards, 2 ranks" deadlock
  "if (count_up(control().chunks_done, backward_ * total_chunks_))\n        ring(kWakeAll);"
  "count_up(control().chunks_done, 0);")
mutant(one_is_woken cpp/reducer/reducer.cc "backwards, 3 ranks" deadlock
  "if (count_up(control().chunks_done, backward_ * total_chunks_))\n        ring(kWakeAll);"
  "if (count_up(control().chunks_done, backward_ * total_chunks_)) ring(1);")
mutant(wake_before_the_change cpp/reducer/reducer.cc "backwards, 2 ranks" deadlock
  "shared.bell.fetch_add(1, std::memory_order_seq_cst);" ""
  "futex_wake(shared.bell, count);" "futex_wake(shared.bell, count); shared.bell.fetch_add(1);")
mutant(sleep_without_comparing cpp/core/wait.h "backwards, 2 ranks" deadlock
  "{{&word, seen}," "{{&word, word.load() + 0 * seen},")
mutant(no_wake_at_the_gate cpp/collectives/calls.cc "collectives, 2 ranks" deadlock
  "futex_wake(gate.phase, kWakeAll)" "(void)0")
mutant(receiver_does_not_ring cpp/core/message_rings.cc "messages, 2 ranks" deadlock
  "channel.read.store(at, std::memory_order_release);\n    ring(transfer.peer)"
  "channel.read.store(at, std::memory_order_release)")
mutant(no_rank_is_woken_by_a_death cpp/core/crash.cc "collectives, a death" deadlock
  "futex_wake(header.abort, kWakeAll)" "(void)0")
mutant(leaves_without_a_word cpp/core/liveness_thread.cc "leaving in mid-backward" deadlock
  "futex_wake(header_.departures, kWakeAll)" "(void)0")

# --- words that are too early or too late ---
mutant(unlinks_before_it_leaves cpp/core/liveness_thread.cc "leaving, a death" "a survivor raised something else than a death"
  "line.life.store(kLifeLeft, std::memory_order_seq_cst);"
  "line.robust_head.list.next = &line.robust_head.list; line.life.store(kLifeLeft, std::memory_order_seq_cst);")
mutant(counts_before_it_writes cpp/reducer/reducer.cc "backwards, 2 ranks" "(a wrong mean|race|a gradient)"
  "reduce_chunk(chunks_[chunk]);" ""
  "if (count_up(control().chunks_done, backward_ * total_chunks_))\n        ring(kWakeAll);"
  "const bool is_last = count_up(control().chunks_done, backward_ * total_chunks_);\n      reduce_chunk(chunks_[chunk]);\n      if (is_last) ring(kWakeAll);")
mutant(claims_in_two_steps cpp/reducer/reducer.cc "backwards, 2 ranks" "(a wrong mean|race|a gradient|deadlock)"
  "if (claim.compare_exchange_weak(seen, next + 1,\n                                    std::memory_order_relaxed))"
  "claim.store(next + 1);")
mutant(no_reset_after_a_void_backward cpp/reducer/end_of_backward.cc "backwards, 2 ranks" "(a wrong mean|race|deadlock)"
  "shared.chunks_done.store(backward_ * total_chunks_,\n                             std::memory_order_relaxed);" "")
mutant(gate_opens_before_its_reset cpp/collectives/calls.cc "collectives, 2 ranks" "(deadlock|race|calls differ|a wrong|rank)"
  "gate.arrived.store(0, std::memory_order_relaxed);" ""
  "gate.phase.store(phase + 1, std::memory_order_seq_cst);"
  "gate.phase.store(phase + 1); gate.arrived.store(0);")
mutant(one_buffer_for_all_calls cpp/collectives/calls.h "collectives, 2 ranks" "(race|a wrong)"
  "Layout::small_at(call_.number & 1)" "Layout::small_at(0)")

# --- unused parameters, and the permission for them ---
mutant(no_zeros_for_globally_unused cpp/reducer/end_of_backward.cc "backwards, 2 ranks" "(deadlock|a wrong mean)"
  "if (any_unused && (allow_unused || allow_globally_unused)) add_unused();" "if (any_unused && allow_unused) add_unused();")
mutant(decides_by_its_own_flags cpp/reducer/end_of_backward.cc "backwards, 2 ranks" "(deadlock|another verdict)"
  "if ((verdict & kBackwardUnusedRefused) != 0 && allow_globally_unused" "if ((flags & kBackwardUnusedRefused) != 0 && allow_globally_unused")
mutant(forgets_who_refused cpp/reducer/end_of_backward.cc "backwards, 2 ranks" "(deadlock|another verdict)"
  "if (any_unused && !allow_unused) flags |= kBackwardUnusedRefused;"
  "if (any_unused && !allow_unused && !allow_globally_unused) flags |= kBackwardUnusedRefused;")
mutant(ranks_without_data_count cpp/reducer/end_of_backward.cc "backwards, 2 ranks" "another verdict"
  "if (BackwardStatus::unpack(header(r, backward_).status).finished) continue;" "")
mutant(compares_too_early cpp/reducer/end_of_backward.cc "backwards, 2 ranks" "(deadlock|another verdict)"
  "uint32_t verdict = end_backward(status, flags);"
  "const bool is_alike = is_unused_alike();\n  uint32_t verdict = end_backward(status, flags);"
  "is_unused_alike())" "is_alike)")
mutant(one_place_for_what_is_unused cpp/reducer/reducer.h "backwards, 2 ranks" "(deadlock|another verdict)"
  "(backward & 1) * unused_words_" "0 * unused_words_")

# --- memory orders that are too weak ---
mutant(relaxed_count cpp/reducer/settled_count.cc "backwards, 2 ranks" race
  "seen, seen + 1, std::memory_order_acq_rel" "seen, seen + 1, std::memory_order_relaxed")
mutant(relaxed_post cpp/reducer/reducer.cc "backwards, 2 ranks" race
  "arrived.fetch_add(1, std::memory_order_acq_rel)" "arrived.fetch_add(1, std::memory_order_relaxed)")
mutant(relaxed_gate cpp/collectives/calls.cc "collectives, 2 ranks" race
  "gate.arrived.fetch_add(1, std::memory_order_acq_rel)" "gate.arrived.fetch_add(1, std::memory_order_relaxed)")
mutant(relaxed_message cpp/core/message_rings.cc "messages, 2 ranks" race
  "channel.written.store(at, std::memory_order_release)" "channel.written.store(at, std::memory_order_relaxed)")

# --- each survivor decides alone ---
mutant(no_poison cpp/reducer/settled_count.h "backwards, a death, 3 ranks" "(survivors disagree|a wrong mean)"
  "const bool is_reached = settle(count, target);" "throw;\n    const bool is_reached = false;")
mutant(goes_on_after_the_end cpp/reducer/reducer.cc "backwards, a death, 2 ranks" "rank [0-9] claimed [0-9]+ chunks after the end"
  "if (session_.is_over()) break;" "")

# --- the work of one host ---
mutant(no_ring_when_posted cpp/reducer/host_sums.cc "hosts, 2 ranks" deadlock
  "own.store(backward_, std::memory_order_release);\n  ring();" "own.store(backward_, std::memory_order_release);")
mutant(no_ring_when_published cpp/reducer/host_sums.cc "hosts, 2 ranks" deadlock
  "if (is_last) ring();" "(void)is_last;")
mutant(relaxed_bucket cpp/reducer/host_sums.cc "hosts, 2 ranks" race
  "own.store(backward_, std::memory_order_release)" "own.store(backward_, std::memory_order_relaxed)")
mutant(waits_for_all_but_one cpp/reducer/host_sums.cc "hosts, 2 ranks" "(race|a wrong mean|a gradient)"
  "for (int r = 0; r < session_.world(); ++r) {\n    // Acquire; pairs with the release in post()."
  "for (int r = 1; r < session_.world(); ++r) {\n    // Acquire; pairs with the release in post().")
mutant(each_rank_sees_for_itself cpp/reducer/host_sums.cc "hosts, a death and a lost peer" "survivors disagree"
  "wait_settled(count, all, [&] {" "([](auto wait) { wait(); })([&] {")
mutant(looks_at_the_end_first cpp/reducer/host_sums.cc "hosts, a lost peer" "survivors disagree"
  "if (closed_) throw Failure{.reason = Reason::kClosed};\n  fault_point(Point::kBeforeEnd);"
  "check_usable();\n  fault_point(Point::kBeforeEnd);")
