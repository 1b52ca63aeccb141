;;; The potential of FlashCart 0.1.0 as its default configuration builds it, and its training step (benchmarks/potential.py).
;;; Variants are the sizes of the paper: 69,316, 463,712, 1,065,088 and 2,978,392 parameters with ten elements.
(import "nn" "optim" "flashcart")

(defknob channels 64 "feature channels of every rank" :min 1)
(defknob l-hidden 2 "highest rank of the atoms' features between layers" :min 0)
(defknob l-edge 3 "highest rank of the edge attributes" :min 0)
(defknob r-max 6.0 "cutoff radius in Å")
(defknob layers 3 "message-passing layers" :min 1)
(defknob correlation 3 "factors of the many-body products" :min 1)
(defknob reduced false "whether products sum their paths with trained weights")
(defknob neighbours 50.0 "what messages are divided by the root of")
(defknob hidden 64 "units of the hidden layers" :min 1)

(defvariant paper-69k :channels 20 :layers 2 :reduced true)
(defvariant paper-0.5M :channels 32 :correlation 5)
(defvariant paper-1.1M)
(defvariant paper-3.0M :channels 88 :correlation 5)
(defvariant tiny :channels 3 :l-hidden 1 :l-edge 2 :layers 2 :correlation 2 :hidden 4 :r-max 2.0)

(defdata atoms (extxyz "atoms.extxyz" :elements (H C N O F P S Cl Br I) :cutoff r-max))

(deflayer site-energies (vectors species senders receivers)
  (let* ((lengths (vector-lengths vectors))
         (attributes (edge-attributes vectors lengths l-edge))
         (radial (* (chebyshev lengths :count 8 :r-max r-max)
                    (reshape (polynomial-cutoff lengths :r-max r-max) [(dim lengths 0) 1])))
         (atoms (dim species 0))
         (x (reshape (embedding species 10 channels) [atoms 1 channels]))
         (found nil))
    (dolist (i (range layers))
      (setq x (interaction x attributes radial senders receivers channels :l-max l-edge :hidden [hidden hidden]
                           :neighbours neighbours :norm true))
      (setq x (gate x :activation normalized-silu))
      (setq x (product-layer x :correlation correlation :l-max (if (= i (- layers 1)) 0 l-hidden) :reduced reduced :norm true))
      (setq found (append found [(scalars x)])))
    (reshape (scalar-mlp (concat found :axis -1) [hidden hidden 1] :name "readout") [atoms])))

(defun energy-forces (positions offsets species senders receivers graph graph-mask)
  (let ((energy (sum-by (site-energies (edge-vectors positions offsets senders receivers) species senders receivers)
                        graph (dim graph-mask 0))))
    (list energy (forces-of (* energy graph-mask) positions))))

;; Mean squares of an atom's energy and of force components.
(defun training-loss (positions offsets species senders receivers graph graph-mask atom-mask atoms energy forces)
  (destructuring-bind (e f) (energy-forces positions offsets species senders receivers graph graph-mask)
    (+ (/ (masked-sum (square (/ (- e energy) atoms)) graph-mask) (sum graph-mask))
       (/ (masked-sum (square (- f forces)) atom-mask) (* 3 (sum atom-mask))))))

(defrun train
  :data (graphs atoms :batch 1)
  :loss training-loss
  :optimizer (adamw :lr 1e-3 :weight-decay 0)
  :steps 1000)
